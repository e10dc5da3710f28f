"""The fused stack as one first-order autograd function over the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normalign import _dispatch, _load
from normalign._first_order import first_order
from normalign._stack_recognise import Layer

# Both must agree with the enumerations in csrc/grokalign_stack.h.
PENALTIES = {"orthogonal": 1, "jacobian": 2, "joint": 3}
CRITERIA = {"cross_entropy": 1, "squared_error": 2}
_MOST_SPARE_BYTES = 64 << 20  # larger workspaces are given back to the system


class Criterion(NamedTuple):
    """A task loss that the kernels compute along with the penalty, and the penalty's weight."""

    kind: str  # a key of CRITERIA
    target: Tensor  # (B,) int64 classes, or (B, c) values
    ignore_index: int
    penalty_weight: float


class Loss(NamedTuple):
    """The total, differentiable, and its parts, which are not."""

    total: Tensor
    logits: Tensor
    parts: Tensor  # (2,): task loss and penalty


class FusedStack:
    """A stack of Linear layers, bound to the compiled kernels."""

    def __init__(
        self,
        linears: Sequence[Layer],
        activations: Sequence[tuple[int, float, float]],
        penalty: str,
    ) -> None:
        self.linears = tuple(linears)
        self.widths = [linears[0].weight.shape[1], *(m.weight.shape[0] for m in linears)]
        self.spares: list[Tensor] = []  # workspaces that wait for the next step
        self.shape = _load._C.GrokalignStackShape(
            self.widths,
            [m.bias is not None for m in linears],
            [a for a, _, _ in activations],
            [p0 for _, p0, _ in activations],
            [p1 for _, _, p1 in activations],
            PENALTIES[penalty],
        )

    def __call__(self, x: Tensor, probes: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """Logits and penalty; see ``StackPlan.run``."""
        logits, penalty = _penalty(self, x, probes, reduction, *self._parameters())
        return logits, penalty

    def loss(self, x: Tensor, probes: Tensor, criterion: Criterion) -> Loss:
        """Task loss and weighted penalty in one; see ``StackPlan.loss``."""
        logits = x.new_empty(x.shape[0], self.widths[-1])
        parts = x.new_empty(2)
        total = _loss(self, x, probes, criterion, logits, parts, *self._parameters())
        return Loss(total, logits, parts)

    def _parameters(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for m in self.linears:
            found += (m._parameters["weight"], m._parameters["bias"])
        return found


def _step(
    ctx: Any,
    stack: FusedStack,
    x: Tensor,
    probes: Tensor,
    logits: Tensor,
    parameters: tuple[Tensor | None, ...],
) -> tuple[Any, Any]:
    """One step's state in the extension, and what must live until its forward pass is done.

    The backward pass reads the workspace and the parameters alone, so ``ctx`` keeps nothing else
    alive. To keep the logits, which lead back to ``ctx``, would be a cycle: the step's memory would
    wait for the garbage collector.
    """
    x = x.resolve_neg()
    if x.stride(1) != 1:
        x = x.contiguous()
    probes = probes.contiguous()
    kind = _load._C.GrokalignStackStep_f32
    if x.dtype is torch.float64:
        kind = _load._C.GrokalignStackStep_f64
    addresses = [0 if p is None else p.data_ptr() for p in parameters]
    step = kind(
        stack.shape, x.shape[0], probes.shape[0], _dispatch.threads(),
        addresses[0::2], addresses[1::2],
        x.data_ptr(), x.stride(0), probes.data_ptr(), logits.data_ptr(),
    )  # fmt: skip
    ctx.step = step
    # Saved for their version counters: a weight changed in place in between is an error.
    ctx.save_for_backward(*parameters)
    return step, (x, probes)


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is


class _Workspace:
    """Memory of one step, which goes back to its stack when the step's graph is gone.

    Fresh memory costs a page fault for every 4 KiB, which is a third of a small step. Two spares
    are enough: one step's loss is usually alive while the next step runs.
    """

    __slots__ = ("memory", "spares")

    def __init__(self, size: int, spares: list[Tensor]) -> None:
        self.spares = spares
        try:  # another thread may take the last one between a look and the pop
            self.memory = spares.pop()
        except IndexError:
            self.memory = _bytes(size)
        if self.memory.shape[0] < size:
            self.memory = _bytes(size)

    def __del__(self) -> None:
        if len(self.spares) < 2 and self.memory.shape[0] <= _MOST_SPARE_BYTES:
            self.spares.append(self.memory)


def _workspace(ctx: Any, stack: FusedStack, step: Any) -> int:
    ctx.workspace = _Workspace(step.workspace() + 64, stack.spares)
    address: int = ctx.workspace.memory.data_ptr()
    return address


def _backward(
    ctx: Any, skip: int, grad_logits: int, grad_penalty: int, grad_total: int
) -> tuple[Tensor | None, ...]:
    """Gradients of the parameters, behind ``skip`` arguments that have none."""
    parameters = ctx.saved_tensors
    grads: list[Any] = [
        torch.empty_like(p.detach()) if need else None
        for p, need in zip(parameters, ctx.needs_input_grad[skip:], strict=True)
    ]
    addresses = [0 if g is None else g.data_ptr() for g in grads]
    ctx.step.backward(grad_logits, grad_penalty, grad_total, addresses[0::2], addresses[1::2])
    return (*(None,) * skip, *grads)


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stack: FusedStack,
        x: Tensor,
        probes: Tensor,
        reduction: str,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        per_sample = reduction == "none"
        logits = x.new_empty(x.shape[0], stack.widths[-1])
        penalty = x.new_empty(x.shape[0] if per_sample else ())
        step, held = _step(ctx, stack, x, probes, logits, parameters)
        step.forward(_workspace(ctx, stack, step), penalty.data_ptr(), per_sample, 0, 0)
        del held  # not before
        ctx.set_materialize_grads(False)
        return logits, penalty

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_logits: Tensor | None, grad_penalty: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # Held until the kernel is done: a contiguous copy must outlive its address.
        g = None if grad_logits is None else grad_logits.resolve_neg().contiguous()
        p = None if grad_penalty is None else grad_penalty.resolve_neg().contiguous()
        if g is None and p is None:
            return (None,) * len(ctx.needs_input_grad)
        return _backward(
            ctx, 4, 0 if g is None else g.data_ptr(), 0 if p is None else p.data_ptr(), 0
        )


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stack: FusedStack,
        x: Tensor,
        probes: Tensor,
        criterion: Criterion,
        logits: Tensor,
        parts: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        target = criterion.target.resolve_neg().contiguous()
        step, held = _step(ctx, stack, x, probes, logits, parameters)
        step.criterion(
            CRITERIA[criterion.kind],
            target.data_ptr(),
            criterion.ignore_index,
            criterion.penalty_weight,
        )
        total = x.new_empty(())
        task = parts.data_ptr()
        step.forward(
            _workspace(ctx, stack, step), task + parts.element_size(), False, task, total.data_ptr()
        )
        del held  # not before
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, 6, 0, 0, grad_total.data_ptr())


_penalty: Any = _Penalty.apply
_loss: Any = _Loss.apply
