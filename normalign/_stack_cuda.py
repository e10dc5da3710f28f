"""The fused stack on a GPU: one first-order autograd function over the CUDA kernels.

A small stack runs in four launches, with each block of rows in shared memory; they also take the
penalty's mean over the batch and, for ``GrokAlignLoss``, the task loss. A wide one, and the joint
penalty, leave the products to torch, with one kernel for everything between two of them. Nothing
synchronises and nothing is allocated outside torch, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normalign import _gpu
from normalign._first_order import first_order
from normalign._load import address
from normalign._stack_native import CRITERIA, Criterion, Loss
from normalign._stack_recognise import Layer
from normalign._stack_wide_cuda import SQUARE, Activation, Gradients, Parameters, WideStep

PENALTIES = ("orthogonal", "jacobian", "joint")
# Kind of criterion, target, ignored class, penalty's weight; addresses of the penalty's mean, the
# task loss, and their sum. See csrc/cuda/bind_stack.cpp.
_Means = tuple[int, int, int, float, int, int, int]


def _plain(tensor: Tensor) -> Tensor:
    """Its values as they are in memory, the entries of a row one behind the other."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class GpuStack:
    """A stack of Linear layers on the GPU that its inputs are on."""

    def __init__(self, linears: Sequence[Layer], activations: Sequence[Activation]) -> None:
        self.linears = tuple(linears)
        self.activations = tuple(activations)
        self.widths = [linears[0].weight.shape[1], *(m.weight.shape[0] for m in linears)]
        self.squares = sum(kind == SQUARE for kind, _, _ in activations)
        self._native: dict[str, Any] = {}

    def native(self, device: torch.device) -> Any:
        """The compiled stack of the module that serves this device."""
        if device.type not in self._native:
            self._native[device.type] = _gpu.module(device).Stack(
                self.widths,
                [kind for kind, _, _ in self.activations],
                [p0 for _, p0, _ in self.activations],
                [p1 for _, _, p1 in self.activations],
            )
        return self._native[device.type]

    def __call__(
        self, x: Tensor, probes: Tensor, penalty: str, reduction: str
    ) -> tuple[Tensor, Tensor]:
        """Logits and penalty; see ``StackPlan.run``."""
        run, parameters = self._prepared(x, penalty)
        logits, value = _Function.apply(run, x, probes, reduction, *parameters)  # type: ignore[no-untyped-call]
        return logits, value

    def small(self, x: Tensor, penalty: str) -> bool:
        """Whether the kernels take the whole stack, task loss included."""
        if penalty == "joint":
            return False
        return bool(self.native(x.device).fits(x.element_size(), _gpu.where(x.device)[0]))

    def loss(self, x: Tensor, probes: Tensor, penalty: str, criterion: Criterion) -> Loss:
        """Task loss and weighted penalty of a small stack; see ``StackPlan.loss``."""
        run, parameters = self._prepared(x, penalty)
        logits = x.new_empty(x.shape[0], self.widths[-1])
        parts = x.new_empty(2)
        total = _LossFunction.apply(run, x, probes, criterion, logits, parts, *parameters)  # type: ignore[no-untyped-call]
        return Loss(total, logits, parts)

    def _prepared(self, x: Tensor, penalty: str) -> tuple[_Small | WideStep, list[Tensor | None]]:
        parameters: list[Tensor | None] = []
        for m in self.linears:
            parameters += (m.weight, m.bias)
        run: _Small | WideStep = _Small(self) if self.small(x, penalty) else WideStep(self)
        run.project = penalty == "orthogonal"
        run.joint = penalty == "joint"
        run.tangent = torch.is_grad_enabled() and any(
            p is not None and p.requires_grad for p in parameters
        )
        return run, parameters


class _Small:
    """One step in four launches."""

    project = True
    tangent = True
    joint = False

    def __init__(self, stack: GpuStack) -> None:
        self.stack = stack

    def forward(
        self, x: Tensor, probes: Tensor, parameters: Parameters, mean: bool
    ) -> tuple[Tensor, Tensor]:
        logits, penalty = x.new_empty(x.shape[0], self.stack.widths[-1]), x.new_empty(x.shape[0])
        total = x.new_empty(()) if mean else None
        means = (0, 0, 0, 0.0, address(total), 0, 0)
        self.launch_forward(x, probes, parameters, logits, penalty, means)
        return logits, penalty if total is None else total

    def launch_forward(
        self,
        x: Tensor,
        probes: Tensor,
        parameters: Parameters,
        logits: Tensor,
        penalty: Tensor,
        means: _Means,
    ) -> None:
        native, dtype = self.stack.native(x.device), _gpu.suffix(x)
        size = getattr(native, f"workspace_{dtype}")(
            x.shape[0], probes.shape[0], _gpu.where(x.device)[0]
        )  # fmt: skip
        self.workspace = x.new_empty(size)
        getattr(native, f"forward_{dtype}")(
            *self.call(x, probes, parameters), self.project, self.tangent,
            logits.data_ptr(), penalty.data_ptr(), means, *_gpu.where(x.device),
        )  # fmt: skip

    def call(self, x: Tensor, probes: Tensor, parameters: Parameters) -> tuple[Any, ...]:
        weights = [address(p) for p in parameters[0::2]]
        biases = [address(p) for p in parameters[1::2]]
        return (
            x.shape[0], probes.shape[0], weights, biases, x.data_ptr(), x.stride(0),
            probes.data_ptr(), self.workspace.data_ptr(),
        )  # fmt: skip

    def backward(
        self,
        x: Tensor,
        probes: Tensor,
        parameters: Parameters,
        of: Gradients,
        wanted: Sequence[bool],
        of_total: Tensor | None = None,
    ) -> list[Tensor | None]:
        grads = [
            torch.empty_like(p) if p is not None and want else None
            for p, want in zip(parameters, wanted, strict=True)
        ]
        addresses = [address(g) for g in grads]
        of_logits, of_penalty, factor = of
        stride = 0 if of_penalty is None or of_penalty.dim() == 0 else of_penalty.stride(0)
        getattr(self.stack.native(x.device), f"backward_{_gpu.suffix(x)}")(
            *self.call(x, probes, parameters), address(of_logits), address(of_penalty), stride,
            factor, address(of_total), addresses[0::2], addresses[1::2], *_gpu.where(x.device),
        )  # fmt: skip
        return grads


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: _Small | WideStep,
        x: Tensor,
        probes: Tensor,
        reduction: str,
        *parameters: Any,
    ) -> tuple[Tensor, Tensor]:
        x, probes = _plain(x), _plain(probes.to(x.dtype)).contiguous()
        logits, penalty = run.forward(x, probes, parameters, reduction == "mean")
        ctx.set_materialize_grads(False)
        ctx.run, ctx.reduction = run, reduction
        # Saved for their version counters: a weight changed in place in between is an error.
        ctx.save_for_backward(x, probes, *parameters)
        return logits, penalty

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_logits: Tensor | None, grad_penalty: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, probes, *parameters = ctx.saved_tensors
        if grad_logits is None and grad_penalty is None:
            return (None,) * (4 + len(parameters))
        factor = 2.0 / probes.shape[0]
        if ctx.reduction == "mean":
            factor /= x.shape[0]
        if grad_logits is not None:
            grad_logits = grad_logits.resolve_neg().contiguous()
        if grad_penalty is not None:
            grad_penalty = grad_penalty.resolve_neg()
        of = (grad_logits, grad_penalty, factor)
        grads = ctx.run.backward(x, probes, parameters, of, ctx.needs_input_grad[4:])
        return (None, None, None, None, *grads)


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: _Small,
        x: Tensor,
        probes: Tensor,
        criterion: Criterion,
        logits: Tensor,
        parts: Tensor,
        *parameters: Any,
    ) -> Tensor:
        x, probes = _plain(x), _plain(probes.to(x.dtype)).contiguous()
        target = criterion.target.resolve_neg().contiguous()
        total, task = x.new_empty(()), parts.data_ptr()
        means = (
            CRITERIA[criterion.kind], target.data_ptr(), criterion.ignore_index,
            criterion.penalty_weight, task + parts.element_size(), task, total.data_ptr(),
        )  # fmt: skip
        penalty = x.new_empty(x.shape[0])
        run.launch_forward(x, probes, parameters, logits, penalty, means)
        ctx.run, ctx.weight = run, criterion.penalty_weight
        ctx.save_for_backward(x, probes, *parameters)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        x, probes, *parameters = ctx.saved_tensors
        factor = 2.0 * ctx.weight / (probes.shape[0] * x.shape[0])
        wanted, of = ctx.needs_input_grad[6:], (None, None, factor)
        grads = ctx.run.backward(x, probes, parameters, of, wanted, grad_total.resolve_neg())
        return (*(None,) * 6, *grads)
