"""The fused stack on a GPU where it is wide: torch's products, one launch between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normalign import _gpu
from normalign._load import address

if TYPE_CHECKING:
    from normalign._stack_cuda import GpuStack

# Must agree with csrc/cuda/stack.h.
_FORWARD, _ADJOINT, _TANGENT, _BACKWARD = range(4)
_FLAT = (0, 1, 2)  # activations whose second derivative is 0: identity, relu, leaky relu
SQUARE = 3

Activation = tuple[int, float, float]
Parameters = Sequence[Tensor | None]  # weight, bias, weight, ...
Gradients = tuple[Tensor | None, Tensor | None, float]  # of logits, of the penalty, its factor


class WideStep:
    """One step, the joint penalty included."""

    project = True
    tangent = True
    joint = False

    def __init__(self, stack: GpuStack) -> None:
        self.stack = stack

    def stage(
        self,
        kind: int,
        l: int,  # noqa: E741
        data: Tensor,
        out: Tensor,
        probes: int = 1,
        bias: Tensor | None = None,
        z: Tensor | None = None,
        u: Tensor | None = None,
        cross: Tensor | None = None,
        of_penalty: Tensor | None = None,
        factor: float = 0.0,
    ) -> Tensor:
        """What stands behind layer ``l - 1``: see ``Stage`` in csrc/cuda/stack.h."""
        activation, p0, p1 = self.stack.activations[l - 1]
        stride = 0 if of_penalty is None or of_penalty.dim() == 0 else of_penalty.stride(0)
        getattr(_gpu.module(data.device), f"stage_{_gpu.suffix(data)}")(
            kind, data.shape[0] // probes, probes, data.shape[1], activation, p0, p1,
            data.data_ptr(), address(bias), address(z), address(u), address(cross),
            address(of_penalty), stride, factor, out.data_ptr(), *_gpu.where(data.device),
        )  # fmt: skip
        return out

    def forward(
        self, x: Tensor, probes: Tensor, parameters: Parameters, mean: bool
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[0::2], parameters[1::2]
        last, (count, batch) = len(weights), probes.shape[:2]
        curved = [kind not in _FLAT for kind, _, _ in self.stack.activations]
        a, z = [x], [x]
        for l in range(1, last + 1):  # noqa: E741
            weight, bias = weights[l - 1], biases[l - 1]
            assert weight is not None
            if l == last:
                logits = a[-1] @ weight.T if bias is None else torch.addmm(bias, a[-1], weight.T)
                break
            z.append(a[-1] @ weight.T)
            a.append(self.stage(_FORWARD, l, z[l], torch.empty_like(z[l]), bias=bias))
        s: list[Tensor] = [probes.reshape(count * batch, -1)] * (last + 1)
        u: list[Tensor | None] = [None] * (last + 1)
        for l in range(last - 1, 0, -1):  # noqa: E741
            weight = weights[l]
            assert weight is not None
            product = s[l + 1] @ weight
            out = torch.empty_like(product) if curved[l - 1] else product
            s[l] = self.stage(_ADJOINT, l, product, out, count, z=z[l])
            u[l] = product if curved[l - 1] else None
        assert weights[0] is not None
        r, penalty = self.residual(x, s[1] @ weights[0], count)
        self.root, self.offsets = None, []
        if self.joint:
            self.root = penalty.clamp_min(0).sqrt()  # of the mean over the probes
            if self.stack.squares:
                offset = self.surplus * logits
            else:
                self.offsets = self.offset(parameters, z, batch)
                offset = self.offsets[-1]
            penalty = self.root.to(x.dtype) + offset.square().sum(1)
        t = [r]
        cross: list[Tensor | None] = [None] * (last + 1)
        for l in range(1, last if self.tangent else 0):  # noqa: E741
            weight = weights[l - 1]
            assert weight is not None
            q = t[-1] @ weight.T
            cross[l] = torch.empty_like(z[l]) if curved[l - 1] else None
            t.append(self.stage(_TANGENT, l, q, q, count, z=z[l], u=u[l], cross=cross[l]))
        self.kept = (a, z, s, t, cross)
        return logits, penalty.mean() if mean else penalty

    @property
    def surplus(self) -> float:
        """``1 - k`` of a stack with squares and no bias, where ``f(t x) = t^k f(x)``.

        Then ``J x = k f(x)``, and the offset ``f(x) - J x`` is this times ``f(x)``.
        """
        return 1.0 - 2.0**self.stack.squares

    def offset(self, parameters: Parameters, z: list[Tensor], batch: int) -> list[Tensor]:
        """``f(x) - J x`` of a piecewise linear stack, and what leads to it: entry l is behind l.

        What remains of the forward pass when the input is 0 and every slope is kept.
        """
        weights, biases = parameters[0::2], parameters[1::2]
        found: list[Tensor] = [z[0].new_empty(0)]  # nothing enters
        for l in range(1, len(weights) + 1):  # noqa: E741
            weight, bias = weights[l - 1], biases[l - 1]
            assert weight is not None
            if l == 1:
                step = weight.new_zeros(batch, weight.shape[0])
                step = step if bias is None else step + bias
            else:
                step = found[-1] @ weight.T
                step = step if bias is None else step.add_(bias)
            if l < len(weights):
                step = self.stage(_ADJOINT, l, step, step, z=z[l])
            found.append(step)
        return found

    def residual(self, x: Tensor, g: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``r`` of every probe and sample, and the mean of ``|r|^2`` over the probes."""
        batch, d = x.shape
        if not self.project:
            # The root of tiny squares must not vanish, so they are summed in float64.
            square = g.double().square() if self.joint else g.square()
            return g, square.sum(1).view(count, batch).mean(0)
        r, norms = torch.empty_like(g), g.new_empty(count, batch)
        f = getattr(_gpu.module(x.device), f"orthogonal_projection_{_gpu.suffix(x)}")
        for p in range(count):
            rows = slice(p * batch, (p + 1) * batch)
            f(
                batch, d, g[rows].data_ptr(), d, x.data_ptr(), x.stride(0), r[rows].data_ptr(), d,
                norms[p].data_ptr(), *_gpu.where(x.device),
            )  # fmt: skip
        return r, norms[0] if count == 1 else norms.mean(0)

    def backward(
        self,
        x: Tensor,
        probes: Tensor,
        parameters: Parameters,
        of: Gradients,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        a, z, s, t, cross = self.kept
        weights = parameters[0::2]
        of_logits, of_penalty, factor = of
        count, last = probes.shape[0], len(weights)
        delta = of_logits
        grads: list[Tensor | None] = [None] * len(parameters)
        row_factor: Tensor | None = None
        of_rows = of_penalty  # of |r|^2, whose root the joint penalty takes
        if of_penalty is not None:
            row_factor = of_penalty * factor
            if self.root is not None:
                half = torch.where(self.root > 0, 0.5 / self.root, 0.0 * self.root)
                row_factor = (row_factor * half).to(x.dtype)
                of_rows = (of_penalty * half).to(x.dtype)
            if row_factor.dim() == 1:
                row_factor = row_factor.repeat(count).unsqueeze(1)
            if self.joint and self.stack.squares:
                # The factor holds 2 / probes for the norms; the offset's square wants 2.
                weighted = of_penalty * (factor * count * self.surplus**2)
                top = weights[-1]
                assert top is not None
                term = (a[-1] @ top.T) * (weighted if weighted.dim() == 0 else weighted[:, None])
                delta = term if delta is None else delta + term
        for l in range(last, 0, -1):  # noqa: E741
            weight = weights[l - 1]
            assert weight is not None
            at = 2 * (l - 1)
            if wanted[at]:
                grad = torch.zeros_like(weight) if delta is None else delta.T @ a[l - 1]
                if row_factor is not None:
                    grad.addmm_((s[l] * row_factor).T, t[l - 1])
                grads[at] = grad
            if wanted[at + 1] and parameters[at + 1] is not None:
                bias = parameters[at + 1]
                assert bias is not None
                grads[at + 1] = torch.zeros_like(bias) if delta is None else delta.sum(0)
            if l == 1:
                break
            bend = cross[l - 1] if of_penalty is not None else None
            if delta is None and bend is None:
                continue
            product = torch.zeros_like(z[l - 1]) if delta is None else delta @ weight
            delta = self.stage(
                _BACKWARD, l - 1, product, product, z=z[l - 1], cross=bend,
                of_penalty=of_rows, factor=factor,
            )  # fmt: skip
        if self.offsets and of_penalty is not None:
            # The factor holds 2 / probes for the norms; the offset's square wants 2.
            weighted = of_penalty * (factor * count)
            self.offset_gradients(parameters, z, weighted, grads)
        return grads

    def offset_gradients(
        self,
        parameters: Parameters,
        z: list[Tensor],
        weighted: Tensor,
        grads: list[Tensor | None],
    ) -> None:
        """Adds the gradient of ``|f(x) - J x|^2``: a backward pass through ``offset``."""
        if weighted.dim() == 1:
            weighted = weighted.unsqueeze(1)
        e = self.offsets[-1] * weighted
        for l in range(len(self.offsets) - 1, 0, -1):  # noqa: E741
            weight, at = parameters[2 * (l - 1)], 2 * (l - 1)
            assert weight is not None
            to_weight, to_bias = grads[at], grads[at + 1]
            if to_weight is not None and l > 1:
                to_weight.addmm_(e.T, self.offsets[l - 1])
            if to_bias is not None:
                to_bias.add_(e.sum(0))
            if l > 1:
                product = e @ weight
                e = self.stage(_ADJOINT, l - 1, product, product, z=z[l - 1])
