"""Projected gradient ascent in a box or an ellipsoid, on any model with outputs and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

LOSSES = ("mse", "cross_entropy", "margin")
NORMS = ("linf", "l2")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the attack runs.

    Attributes:
        norm: ``"linf"`` or ``"l2"``.
        loss: What is increased: ``"mse"`` (to the one-hot label), ``"cross_entropy"``, or
            ``"margin"`` (best other output minus the label's).
        steps: Gradient steps.
        step_size: Length of a step as a share of eps.
        restarts: Independent starts; the first that succeeds counts.
        random_start: Start at a random point of the region instead of at the input.
        best_iterate: Keep, of all points visited (the input is the first), a misclassified one if
            there is any, else the one with the largest margin. Without it the last point is the
            result, however it fares.
    """

    norm: str = "linf"
    loss: str = "margin"
    steps: int = 40
    step_size: float = 0.1
    restarts: int = 2
    random_start: bool = True
    best_iterate: bool = True


# The attack of the paper's table: 20 steps of eps / 10 from a random start, the last point taken.
PUBLISHED = Settings(loss="mse", steps=20, step_size=0.1, restarts=1, best_iterate=False)
STRONG = Settings()


@dataclasses.dataclass
class Outcome:
    """What an attack found.

    Attributes:
        x: Adversarial inputs, shaped as the inputs.
        wrong: Rows that are misclassified there, shape ``(B,)``.
        zero_gradients: Gradients that were exactly zero.
        gradients: Gradients that were computed.
    """

    x: Tensor
    wrong: Tensor
    zero_gradients: int
    gradients: int


class Victim:
    """A model seen by the attack: its outputs, and cotangents pulled back to the input."""

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(B, c)``."""
        raise NotImplementedError

    def gradient(self, x: Tensor, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and ``J(x)^T cotangent(outputs)``."""
        raise NotImplementedError

    def attack(
        self,
        x: Tensor,
        labels: Tensor,
        start: Tensor,
        scale: Tensor,
        settings: Settings,
        bounds: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor, int, int] | None:
        """All steps at once, where the model has its own loop: as ``_ascend``, and the outputs."""
        return None


class TorchVictim(Victim):
    """Any callable from inputs to ``(B, c)`` outputs, through autograd."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(B, c)``."""
        with torch.no_grad():
            return self._checked(self.model(x), x)

    def gradient(self, x: Tensor, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and ``J(x)^T cotangent(outputs)``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            outputs = self._checked(self.model(x), x)
            direction = cotangent(outputs.detach())
            (gradient,) = torch.autograd.grad(outputs, x, direction)
        return outputs.detach(), gradient

    @staticmethod
    def _checked(outputs: Tensor, x: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(x):
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            msg = f"the model must return outputs of shape ({len(x)}, classes), got {got}"
            raise ValueError(msg)
        return outputs


@contextlib.contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Runs the body with every module in eval mode, and puts each one's mode back."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def loss_and_cotangent(loss: str, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The attack's loss of each row ``(B,)``, and its derivative by the outputs ``(B, c)``."""
    rows = torch.arange(len(outputs), device=outputs.device)
    if loss == "mse":
        residual = outputs.clone()
        residual[rows, labels] -= 1.0
        return residual.square().mean(dim=1), residual * (2.0 / outputs.shape[1])
    if loss == "cross_entropy":
        cotangent = outputs.softmax(dim=1)
        cotangent[rows, labels] -= 1.0
        return torch.logsumexp(outputs, dim=1) - outputs[rows, labels], cotangent
    others = outputs.clone()
    others[rows, labels] = -torch.inf
    best, index = others.max(dim=1)
    cotangent = torch.zeros_like(outputs)
    cotangent[rows, index] = 1.0
    cotangent[rows, labels] -= 1.0
    return best - outputs[rows, labels], cotangent


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """The best other output minus the label's, ``(B,)``; -inf where there is no other class."""
    return loss_and_cotangent("margin", outputs, labels)[0]


def misclassified(outputs: Tensor, labels: Tensor) -> Tensor:
    """Rows whose first largest output is not the label's; a NaN counts as wrong."""
    return (outputs.argmax(dim=1) != labels) | outputs.isnan().any(dim=1)


def run(
    victim: Victim,
    x: Tensor,
    labels: Tensor,
    scale: Tensor,
    settings: Settings,
    generator: torch.Generator,
    bounds: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Outcome:
    """Attacks every row of ``x``.

    Args:
        victim: The model.
        x: Inputs, shape ``(B, ...)``.
        labels: Class indices, shape ``(B,)``.
        scale: Shape of one input. The region is ``x + scale * z`` with ``|z| <= 1`` in the norm;
            a coordinate with scale 0 is frozen.
        settings: How to attack.
        generator: Draws the random starts, on the CPU.
        bounds: Least and largest allowed value, each broadcasting to one input.
    """
    outcome = Outcome(x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device), 0, 0)
    best = x.new_full((len(x),), -torch.inf)
    if settings.best_iterate:
        outputs = victim.outputs(x)
        best, outcome.wrong = margins(outputs, labels), misclassified(outputs, labels)
    for _ in range(settings.restarts):
        # Drawn for all rows, attacked or not, so that one row's start never depends on another.
        start = _bounded(first_iterate(x, scale, settings, generator), bounds)
        active = torch.nonzero(~outcome.wrong)[:, 0]
        if not len(active):
            break
        rows = x[active], labels[active], start[active]
        result = victim.attack(*rows, scale, settings, bounds)
        if result is None:
            point, zeros, gradients = _ascend(victim, *rows, scale, settings, bounds)
            outputs = victim.outputs(point)
        else:
            point, outputs, zeros, gradients = result
        reached, wrong = margins(outputs, labels[active]), misclassified(outputs, labels[active])
        better = wrong | (reached > best[active])
        outcome.x[active[better]] = point[better]
        best[active[better]] = reached[better]
        outcome.wrong[active] |= wrong
        outcome.zero_gradients += zeros
        outcome.gradients += gradients
    return outcome


def _ascend(
    victim: Victim,
    x: Tensor,
    labels: Tensor,
    start: Tensor,
    scale: Tensor,
    settings: Settings,
    bounds: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, int, int]:
    """One start: the result for each row, and how many gradients were zero and computed.

    With ``best_iterate`` a row that is misclassified is left where it is from then on.
    """
    result = start.clone()
    best = x.new_full((len(x),), -torch.inf)
    active = torch.arange(len(x), device=x.device)
    point = start
    zeros = gradients = 0
    for _ in range(settings.steps):
        target = labels[active]
        outputs, gradient = victim.gradient(point, _cotangent(settings.loss, target))
        gradients += len(point)
        zeros += _zero_rows(gradient)
        if settings.best_iterate:
            reached, wrong = margins(outputs, target), misclassified(outputs, target)
            better = wrong | (reached > best[active])
            result[active[better]] = point[better]
            best[active[better]] = reached[better]
            active, point, gradient = active[~wrong], point[~wrong], gradient[~wrong]
            if not len(active):
                return result, zeros, gradients
        point = _bounded(_step(x[active], point, gradient, scale, settings), bounds)
    if settings.best_iterate:
        outputs, target = victim.outputs(point), labels[active]
        better = misclassified(outputs, target) | (margins(outputs, target) > best[active])
        active, point = active[better], point[better]
    result[active] = point
    return result, zeros, gradients


def _cotangent(loss: str, labels: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda outputs: loss_and_cotangent(loss, outputs, labels)[1]


def _zero_rows(gradient: Tensor) -> int:
    return int((~gradient.flatten(1).ne(0).any(dim=1)).sum())


def _expand(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))


def first_iterate(
    x: Tensor, scale: Tensor, settings: Settings, generator: torch.Generator
) -> Tensor:
    """Where an attack starts: at random in the region, or at ``x``."""
    if not settings.random_start:
        return x.clone()
    if settings.norm == "linf":
        z = 2.0 * torch.rand(x.shape, dtype=x.dtype, generator=generator) - 1.0
    else:  # uniform in the ball of the coordinates that may move
        z = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        z = torch.where(scale.cpu() > 0, z, 0.0)
        moving = max(1, int((scale > 0).sum()))
        radius = torch.rand(len(x), dtype=x.dtype, generator=generator) ** (1.0 / moving)
        length = z.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
        z = z * _expand(radius / length, z)
    return _project(x, x + scale * z.to(x.device), scale, settings.norm)


def _step(x: Tensor, point: Tensor, gradient: Tensor, scale: Tensor, settings: Settings) -> Tensor:
    """One step of steepest ascent in the coordinates ``z``, back into the region."""
    if settings.norm == "linf":
        move = scale * gradient.sign()
    else:
        direction = scale * gradient
        # Divided by the largest entry first: squares of tiny gradients would underflow.
        largest = direction.flatten(1).abs().amax(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
        direction = direction / _expand(largest, direction)
        length = direction.flatten(1).norm(dim=1).clamp(min=1e-12)
        move = scale * direction / _expand(length, direction)
    return _project(x, point + settings.step_size * move, scale, settings.norm)


def _project(x: Tensor, point: Tensor, scale: Tensor, norm: str) -> Tensor:
    if norm == "linf":
        return torch.minimum(torch.maximum(point, x - scale), x + scale)
    z = torch.where(scale > 0, (point - x) / scale, 0.0)
    length = z.flatten(1).norm(dim=1)
    shrink = torch.where(length > 1.0, 1.0 / length, 1.0)
    return torch.where(_expand(length > 1.0, z), x + scale * z * _expand(shrink, z), point)


def _bounded(point: Tensor, bounds: tuple[Tensor | None, Tensor | None]) -> Tensor:
    low, high = bounds
    if low is not None:
        point = torch.maximum(point, low)
    if high is not None:
        point = torch.minimum(point, high)
    return point
