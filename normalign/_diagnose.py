"""Turns the ways in which a model defeats a second derivative into errors that say what to do."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

_COMPILED = (
    "the model, or a part of it, was compiled with torch.compile, which cannot be differentiated "
    "twice. Pass the uncompiled model (compiled._orig_mod), or compile the whole step, with "
    "grokalign inside the compiled function"
)
_REENTRANT = (
    "the model uses reentrant activation checkpointing, which cannot be differentiated twice. "
    "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)
_CUDNN = (
    "cuDNN has no second derivative of a recurrent layer. Run the step, forward and backward, "
    "under torch.backends.cudnn.flags(enabled=False)"
)
_MISSING = (
    "an operation of the model has no second derivative ({node}). GrokAlign differentiates the "
    "input gradient once more: replace the operation, or give its autograd.Function a backward "
    "that is differentiable (no once_differentiable)"
)


def gradient(flat: Tensor, leaf: Tensor, v: Tensor, create_graph: bool) -> Tensor:
    """``J^T v``, with the errors of this module."""
    try:
        (g,) = torch.autograd.grad(
            flat, leaf, v, create_graph=create_graph, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise RuntimeError(_REENTRANT) from error
        if "double backward" in str(error) and "compile" in str(error):
            raise RuntimeError(_COMPILED) from error
        raise
    if g is None:
        raise ValueError(_no_path())
    return g


def _no_path() -> str:
    return (
        "the logits must be a differentiable function of x, got logits with no gradient path to "
        "x (is there a detach, an argmax or a torch.no_grad in the model?)"
    )


def check_not_compiled(model: Any) -> None:
    """Requires that no part of a module was compiled."""
    if not isinstance(model, nn.Module):
        return
    if not is_compiled(model) and model in _checked:
        return
    if any(is_compiled(m) for m in model.modules()):
        raise RuntimeError(_COMPILED)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of torch.compile, or was compiled in place."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def check_logits(logits: Any, x: Tensor) -> None:
    """Requires floating logits with the batch first and a gradient path to ``x``."""
    if not isinstance(logits, Tensor):
        msg = (
            f"the model must return a tensor of logits, got {type(logits).__name__}; "
            "choose one with output= (a key, or a callable)"
        )
        raise TypeError(msg)
    if logits.dim() == 0 or logits.shape[0] != x.shape[0]:
        msg = (
            f"logits must have the batch of x, {x.shape[0]}, as first dimension, "
            f"got shape {tuple(logits.shape)}"
        )
        raise ValueError(msg)
    if not logits.is_floating_point() or not logits.requires_grad:
        raise ValueError(_no_path())


# Per model, the settings under which its graph has been found good.
_checked: weakref.WeakKeyDictionary[Any, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def check_graph(model: Any, g: Tensor, leaf: Tensor) -> None:
    """Requires that ``g = J^T v`` can itself be differentiated.

    The graph is walked once per model and setting: a missing derivative is a node in it, which
    would otherwise raise, far from here, in the caller's ``backward``.
    """
    if g.grad_fn is None:
        return
    key = (getattr(model, "training", None), leaf.dtype, leaf.device.type)
    try:
        known = _checked.setdefault(model, set())
    except TypeError:  # cannot be referenced weakly
        known = set()
    if key in known:
        return
    seen: set[Any] = set()
    stack: list[Any] = [g.grad_fn]
    names: set[str] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        stack.extend(edge[0] for edge in node.next_functions)
    compiled = sorted(n for n in names if n.startswith("CompiledFunction"))
    if compiled:
        raise RuntimeError(_COMPILED)
    missing = sorted(n for n in names if n.rpartition("::")[2] in ("NotImplemented", "Error"))
    if missing:
        if any("CudnnRnn" in n for n in names):
            raise RuntimeError(_CUDNN)
        around = sorted(n for n in names if "Backward" in n)
        raise RuntimeError(_MISSING.format(node=", ".join(missing + around[:8])))
    known.add(key)
