"""The task loss and the GrokAlign penalty as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normalign import _inputs
from normalign._probes import ProbeStream
from normalign._stack_native import Criterion
from normalign._stack_recognise import hook_reason
from normalign.grokalign import check_names, fused_loss, grokalign

_OWN_FORWARD = {"forward", "output"}


def _fusable(criterion: Any) -> str | None:
    """The kernels' name of a criterion that they can compute with the penalty."""
    kind = type(criterion)
    if kind not in (nn.CrossEntropyLoss, nn.MSELoss) or criterion.reduction != "mean":
        return None
    if hook_reason(criterion) is not None:
        return None
    if kind is nn.CrossEntropyLoss:
        plain = criterion.weight is None and criterion.label_smoothing == 0
        return "cross_entropy" if plain else None
    return "squared_error"


def _check_options(options: dict[str, Any]) -> None:
    """Finds a bad option where it is written, not in the first step."""
    if "reduction" in options:
        msg = "GrokAlignLoss takes the mean over the batch: reduction is no option of it"
        raise TypeError(msg)
    if "probe_vectors" in options:
        msg = "probe_vectors belongs to the call: loss_fn(model, x, y, probe_vectors=...)"
        raise TypeError(msg)
    check_names(options)
    _inputs.check_options(
        options.get("penalty", "orthogonal"),
        options.get("num_probes", 1),
        options.get("probes", "gaussian"),
        options.get("exact", False),
        "mean",
        options.get("implementation", "auto"),
    )


class Parts(NamedTuple):
    """What the last loss was made of, detached."""

    logits: Tensor
    task_loss: Tensor
    penalty: Tensor | None  # without the weight; None where the weight is 0


class GrokAlignLoss(nn.Module):
    """``criterion(logits, y) + weight * penalty`` from one forward pass.

    ::

        loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight=0.1)
        loss = loss_fn(model, x, y)
        loss.backward()

    Its probes come from a stream of its own. ``state_dict`` holds the state of that stream, so a
    restored run continues with the same probes.

    Args:
        criterion: Called as ``criterion(logits, y)``; returns a scalar.
        weight: Of the penalty, at least 0; 0 trains exactly as without it, and costs nothing.
            The attribute may be changed between steps.
        seed: Where the probe stream starts; by default at ``torch.initial_seed()``.
        **options: Those of ``normalign.grokalign``: ``penalty``, ``num_probes``, ``probes``,
            ``exact``, ``forward``, ``output``, ``implementation``, ``check_finite``, ``generator``.

    Attributes:
        weight: Of the penalty.
        last: The logits, task loss and penalty of the last call, detached; ``None`` before it.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Any], Tensor],
        weight: float,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(options)
        self.criterion = criterion
        self.weight = weight
        self.options = options
        self.stream = ProbeStream(torch.initial_seed() if seed is None else seed)
        self._last: tuple[Any, ...] | None = None

    @property
    def last(self) -> Parts | None:
        """The parts of the last loss, detached; ``None`` before the first call."""
        if self._last is None:
            return None
        logits, *parts = self._last
        if len(parts) == 1:  # the kernels write both into one tensor
            parts = parts[0].unbind()
        return Parts(logits, *parts)

    def _keep(self, *last: Tensor | None) -> None:
        self.__dict__["_last"] = last  # nn.Module's own way to set it costs microseconds

    @property
    def weight(self) -> float:
        """The factor of the penalty."""
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            msg = f"weight must be finite and at least 0, got {value}"
            raise ValueError(msg)
        self._weight = float(value)

    def forward(
        self, model: nn.Module, x: Tensor, y: Any, probe_vectors: Tensor | None = None
    ) -> Tensor:
        """The total loss of a batch.

        Args:
            model: See ``normalign.grokalign``.
            x: Inputs ``(B, ...)``.
            y: Targets, as the criterion takes them.
            probe_vectors: Probes to use instead of the stream's, ``(P, B, c)``: a line search
                (LBFGS) needs the same ones in every evaluation of a step.
        """
        options = self.options
        if self._weight == 0:
            forward = options.get("forward")
            result = model(x) if forward is None else forward(model, x)
            logits = _inputs.make_select(options.get("output"))(result)
            task = self._task(logits, y)
            self._keep(logits.detach(), task.detach(), None)
            return task
        generator = options.get("generator", self.stream)
        criterion = self.criterion
        kind = _fusable(criterion)
        if kind is not None and isinstance(y, Tensor) and not _OWN_FORWARD & options.keys():
            ignored: Any = getattr(criterion, "ignore_index", 0)
            fused = fused_loss(
                model,
                x,
                Criterion(kind, y, ignored, self._weight),
                **{**options, "probe_vectors": probe_vectors, "generator": generator},
            )
            if fused is not None:
                self._keep(fused.logits, fused.parts)
                return fused.total
        logits, penalty = grokalign(
            model, x, **{**options, "probe_vectors": probe_vectors, "generator": generator}
        )
        task = self._task(logits, y)
        self._keep(logits.detach(), task.detach(), penalty.detach())
        return task + self._weight * penalty

    def _task(self, logits: Tensor, y: Any) -> Tensor:
        task = self.criterion(logits, y)
        if task.dim() != 0:
            msg = f"criterion must return a scalar, got shape {tuple(task.shape)}"
            raise ValueError(msg)
        return task

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the probe stream, for ``state_dict``."""
        return self.stream.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues the probe stream from ``state_dict``."""
        self.stream.restore(state)

    def extra_repr(self) -> str:
        """Weight and options, for ``print``."""
        return ", ".join(
            [f"weight={self._weight}", *(f"{k}={v!r}" for k, v in self.options.items())]
        )
