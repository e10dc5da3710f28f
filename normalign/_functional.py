"""The general path as pure functions, for torch.compile of a whole step and for torch.func.

``torch.autograd.grad`` cannot be traced by default, and is refused under a function transform;
``torch.func.vjp`` can be traced, and nests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normalign import _general, reference

vjp: Any = torch.func.vjp  # its result has two or three parts; the annotations know one of them


def needed() -> bool:
    """Whether the caller is being compiled, or runs under a transform of torch.func."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def run(
    model: Any,
    forward: Callable[[Any, Tensor], Any] | None,
    select: Callable[[Any], Tensor],
    x: Tensor,
    make_probes: Callable[[Tensor], Tensor],
    penalty: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """As ``_general.run``; ``forward`` and ``select`` are the caller's way into the model.

    A function that is transformed may not change a tensor that it captures, and BatchNorm changes
    its buffers: it gets copies, which are copied back.
    """
    # Not isinstance: older compilers cannot tell the type of a local function.
    buffers = dict(model.named_buffers()) if hasattr(model, "named_buffers") else {}

    def logits_of(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = x.clone()
        if not buffers or forward is not None:
            return select(model(x) if forward is None else forward(model, x)), {}
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        return select(torch.func.functional_call(model, copies, (x,))), copies

    with sdpa_kernel(SDPBackend.MATH):
        logits, pull_back, copies = vjp(logits_of, x, has_aux=True)
    if copies:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(copies[name])
    flat = logits.reshape(logits.shape[0], -1)
    probes = make_probes(flat.detach()).to(flat.dtype)
    full = _general.full_precision
    with torch.autocast(x.device.type, enabled=False):
        gradients = [pull_back(v.reshape(logits.shape))[0] for v in probes.unbind()]
        offset = None
        if penalty == "joint":
            # J x is the derivative in v of x . (J^T v), which is linear in v.
            v = probes[0].reshape(logits.shape)
            _, push = vjp(lambda v: pull_back(v)[0], v)
            (jx,) = push(x.to(gradients[0].dtype))
            offset = full(flat) - full(jx.reshape(flat.shape))
        products = [full(g.flatten(1)) for g in gradients]
        # Plain operations: a compiler fuses them, and every transform knows them.
        project = reference.orthogonal_projection
        values = _general.combine(products, full(x.flatten(1)), penalty, offset, project)
    return logits, values.mean() if reduction == "mean" else values
