"""The fused stack as one first-order autograd function over the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _dispatch, _load
from normalign._first_order import first_order

# Must agree with the enumeration in csrc/grokalign_stack.h.
PENALTIES = {"none": 0, "orthogonal": 1, "jacobian": 2, "joint": 3}


class FusedStack:
    """A stack of Linear layers, bound to the compiled kernels."""

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        activations: Sequence[tuple[int, float, float]],
        penalty: str,
    ) -> None:
        self.linears = tuple(linears)
        self.widths = [linears[0].in_features, *(m.out_features for m in linears)]
        has_bias = [m.bias is not None for m in linears]
        self.native = _load._C.GrokalignStack(
            self.widths,
            has_bias,
            [a for a, _, _ in activations],
            [p0 for _, p0, _ in activations],
            [p1 for _, _, p1 in activations],
            PENALTIES[penalty],
        )

    def __call__(self, x: Tensor, probes: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """Logits and penalty; see ``StackPlan.run``."""
        parameters: list[Tensor | None] = []
        for m in self.linears:
            parameters += (m.weight, m.bias)
        logits, penalty = _Function.apply(self, x, probes, reduction, *parameters)  # type: ignore[no-untyped-call]
        return logits, penalty


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stack: FusedStack, x: Tensor, probes: Tensor, reduction: str, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        if x.stride(1) != 1:
            x = x.contiguous()
        probes = probes.contiguous()
        batch, count = x.shape[0], probes.shape[0]
        double = x.dtype is torch.float64
        native, threads = stack.native, _dispatch.threads()
        size = (native.workspace_f64 if double else native.workspace_f32)(batch, count, threads)
        workspace = torch.empty(size + 64, dtype=torch.uint8)
        logits = x.new_empty(batch, stack.widths[-1])
        penalty = x.new_empty(batch)
        weights = [p.data_ptr() for p in parameters[0::2]]
        biases = [0 if p is None else p.data_ptr() for p in parameters[1::2]]
        call = (
            batch, count, threads, weights, biases, x.data_ptr(), x.stride(0),
            workspace.data_ptr() + -workspace.data_ptr() % 64,
        )  # fmt: skip
        (native.forward_f64 if double else native.forward_f32)(
            *call, probes.data_ptr(), logits.data_ptr(), penalty.data_ptr()
        )
        ctx.set_materialize_grads(False)
        ctx.stack, ctx.workspace, ctx.call, ctx.reduction = stack, workspace, call, reduction
        # Saved for their version counters: a weight changed in place in between is an error.
        ctx.save_for_backward(x, *parameters)
        return logits, penalty.mean() if reduction == "mean" else penalty

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_logits: Tensor | None, grad_penalty: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        if grad_logits is None and grad_penalty is None:
            return (None,) * (4 + len(parameters))
        needs = ctx.needs_input_grad[4:]
        grads = [
            torch.empty_like(p) if p is not None and need else None
            for p, need in zip(parameters, needs, strict=True)
        ]
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        if grad_logits is not None:
            grad_logits = grad_logits.contiguous()
        if grad_penalty is not None:
            if ctx.reduction == "mean":
                grad_penalty = (grad_penalty / x.shape[0]).expand(x.shape[0])
            grad_penalty = grad_penalty.contiguous()
        native = ctx.stack.native
        (native.backward_f64 if x.dtype is torch.float64 else native.backward_f32)(
            *ctx.call,
            0 if grad_logits is None else grad_logits.data_ptr(),
            0 if grad_penalty is None else grad_penalty.data_ptr(),
            addresses[0::2],
            addresses[1::2],
        )
        return (None, None, None, None, *grads)
