"""Which way a call of ``grokalign`` takes: the fused stack, the general path or the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from normalign import _dispatch, _inputs, _stack
from normalign._stack_recognise import has_hooks

# They synchronise or split what passes through their forward.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"}


class Path(NamedTuple):
    """Which way a call of ``grokalign`` takes, and why not the fused stack."""

    name: str  # "fused", "general" or "reference"
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose(
    model: Any,
    x: Tensor,
    penalty: str,
    implementation: str,
    functional: bool,
    own_call: bool = False,
) -> _stack.StackPlan | Path:
    """The plan of the fused stack, or the path that serves instead, with the reason.

    Args:
        model: As for ``grokalign``.
        x: As for ``grokalign``, checked.
        penalty: As for ``grokalign``.
        implementation: As for ``grokalign``.
        functional: Whether a compiler or a function transform is tracing the call.
        own_call: Whether the caller has a way of its own to call the model or take its output.

    Raises:
        RuntimeError: ``"native"`` is asked for and the fused stack cannot serve.
    """
    if implementation == "general":
        return Path("general", "it was asked for")
    if implementation == "reference":
        return Path("reference", "it was asked for")
    if implementation == "auto" and _dispatch.implementation() == "reference":
        return Path("reference", "NORMALIGN_IMPL asks for it")
    plan = _fused(model, x, penalty, functional, own_call)
    if isinstance(plan, _stack.StackPlan):
        return plan
    if implementation == "native":
        msg = f"the fused stack was asked for, but {plan}"
        raise RuntimeError(msg)
    return Path("general", plan)


def _fused(
    model: Any, x: Tensor, penalty: str, functional: bool, own_call: bool
) -> _stack.StackPlan | str:
    """The plan of the fused stack, or why it cannot serve."""
    if functional:
        return "torch.compile or a torch.func transform is tracing the call"
    if own_call:
        return "forward= or output= is given"
    if not isinstance(model, nn.Module):
        return f"the model is no nn.Module, but a {type(model).__name__}"
    if _inputs.autocast_is_on(x.device.type):
        return "autocast is on"
    if x.requires_grad:
        return "x requires a gradient"
    kind = type(model).__name__
    if kind in _WRAPPERS:
        return f"{kind} has to see the forward pass"
    if kind == "OptimizedModule":  # the fused stack is faster than compiled code
        if has_hooks(model):
            return "the compiled module has hooks"
        model = model._orig_mod
    return _stack.plan(model, x, penalty)
