"""Optimizer wrappers from the grokking literature, to compare GrokAlign with.

Each wraps any ``torch.optim`` optimizer, and changes only the gradient that the wrapped one sees:
after ``step`` every ``p.grad`` is what the backward pass made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["EgalitarianGradient", "Grokfast", "OrthoGrad"]


class _GradientWrapper(Optimizer):
    """Steps ``base`` on ``_transform(parameter, gradient)`` of every gradient."""

    def __init__(self, base: Optimizer) -> None:
        if not isinstance(base, Optimizer):
            msg = f"base must be a torch.optim.Optimizer, got {type(base).__name__}"
            raise TypeError(msg)
        if isinstance(base, torch.optim.LBFGS):
            msg = "base must be a first-order optimizer: LBFGS evaluates the loss many times a step"
            raise TypeError(msg)
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        # The very same list: schedulers and base then see one learning rate.
        self.param_groups = base.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to the wrapped optimizer."""
        if hasattr(self, "base"):
            self.base.add_param_group(param_group)
        else:  # called by the constructor
            super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [
            (p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        for _, grad in gradients:
            if grad.layout is not torch.strided or grad.is_complex():
                msg = f"gradients must be dense and real, got {grad.layout} {grad.dtype}"
                raise TypeError(msg)
        try:
            for p, grad in gradients:
                p.grad = self._transform(p, grad)
            self.base.step()
        finally:
            for p, grad in gradients:
                p.grad = grad
        return loss

    def _transform(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """The gradient that the wrapped optimizer sees; ``grad`` itself stays as it is."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State of this wrapper, and of the wrapped optimizer under ``"base"``."""
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` saved."""
        if "base" not in state_dict:
            msg = "state_dict must be one of this wrapper: it has no entry 'base'"
            raise ValueError(msg)
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


class Grokfast(_GradientWrapper):
    """Grokfast with an exponential moving average: slow gradients are amplified.

    Per parameter, ``m <- alpha m + (1 - alpha) g`` with m = g at the first step, and the wrapped
    optimizer sees ``g + amplification m`` (Lee et al., arXiv 2405.20233).

    Args:
        base: The optimizer to wrap.
        alpha: Momentum of the average, in [0, 1).
        amplification: Weight of the average (lambda in the paper), at least 0.

    Raises:
        TypeError: ``base`` is no first-order optimizer; at a step, a gradient is sparse or complex.
        ValueError: a number is out of its range.
    """

    def __init__(self, base: Optimizer, alpha: float = 0.98, amplification: float = 2.0) -> None:
        if not 0 <= alpha < 1:
            msg = f"alpha must be in [0, 1), got {alpha}"
            raise ValueError(msg)
        if not (amplification >= 0 and math.isfinite(amplification)):
            msg = f"amplification must be finite and at least 0, got {amplification}"
            raise ValueError(msg)
        super().__init__(base)
        self.alpha, self.amplification = alpha, amplification

    def _transform(self, parameter: Tensor, grad: Tensor) -> Tensor:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = grad.clone()
        else:
            state["average"].lerp_(grad, 1 - self.alpha)
        return grad.add(state["average"], alpha=self.amplification)


class OrthoGrad(_GradientWrapper):
    """Gradients orthogonal to the weights: no step that only scales the logits.

    Per parameter tensor w with gradient g, ``r = g - (g.w / w.w) w``; the wrapped optimizer sees
    ``r |g| / |r|`` (Prieto et al., arXiv 2501.04697), or ``r`` with ``rescale=False``. A zero w
    projects nothing; a gradient along w leaves zero.

    Args:
        base: The optimizer to wrap.
        rescale: Give the projected gradient the norm of the original.

    Raises:
        TypeError: ``base`` is no first-order optimizer; at a step, a gradient is sparse or complex.
    """

    def __init__(self, base: Optimizer, rescale: bool = True) -> None:
        super().__init__(base)
        self.rescale = rescale

    def _transform(self, parameter: Tensor, grad: Tensor) -> Tensor:
        if grad.numel() == 0:
            return grad
        # Scaled to a largest entry of 1 first: the squares of tiny weights would underflow.
        largest = parameter.abs().max()
        direction = parameter / torch.where(largest > 0, largest, 1)
        direction /= torch.linalg.vector_norm(direction).clamp(min=1)
        projected = grad - (grad * direction).sum() * direction
        if not self.rescale:
            return projected
        norm, rest = torch.linalg.vector_norm(grad), torch.linalg.vector_norm(projected)
        # Below this, what is left is rounding: scaling it up would be a random direction.
        meaningful = rest > 8 * torch.finfo(grad.dtype).eps * norm
        return projected * torch.where(meaningful, norm / torch.where(meaningful, rest, 1), 0)


class EgalitarianGradient(_GradientWrapper):
    """Egalitarian gradient descent: every principal direction moves at the same speed.

    With the singular value decomposition G = U S V^T of a gradient matrix, the wrapped optimizer
    sees ``(G G^T)^{-1/2} G = U V^T`` over the non-zero singular values (Pasand and Dohmatob,
    arXiv 2510.04930). The source speaks of matrices and plain gradient descent. Here tensors of
    more dimensions count as (first, rest) matrices, and vectors as one column: they get unit norm.

    Args:
        base: The optimizer to wrap, as a rule SGD: Adam's scaling undoes the equal speeds.

    Raises:
        TypeError: ``base`` is no first-order optimizer; at a step, a gradient is sparse or complex.
    """

    def _transform(self, parameter: Tensor, grad: Tensor) -> Tensor:
        if grad.numel() == 0:
            return grad
        matrix = grad.reshape(grad.shape[0], -1) if grad.dim() > 1 else grad.reshape(-1, 1)
        if matrix.dtype in (torch.float16, torch.bfloat16):
            matrix = matrix.float()
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        floor = max(matrix.shape) * torch.finfo(matrix.dtype).eps * values[0]
        equalised: Tensor = (left * (values > floor)) @ right
        return equalised.reshape(grad.shape).to(grad.dtype)
