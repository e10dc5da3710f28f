"""Keeps attention in the one form that has a second derivative."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Gradients on, and attention by its definition (the math backend); then as before."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


class _Scope:
    """The math backend from now until ``close``, or until nothing refers to this any more."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))

    def close(self) -> None:
        self._stack.close()

    __del__ = close


_active: weakref.ref[_Scope] | None = None


def _on_backward(*_: Any) -> None:
    """Opens a scope that the engine closes at the end of this backward pass, or drops on error."""
    global _active
    if _active is not None and _active() is not None:
        return
    scope = _Scope()
    _active = weakref.ref(scope)
    torch.autograd.Variable._execution_engine.queue_callback(scope.close)


def keep_in_backward(*outputs: Tensor) -> None:
    """Uses the same attention in the backward pass through ``outputs``.

    Activation checkpointing runs parts of the model again in there, and must find the operations
    of the first run.
    """
    for output in outputs:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(_on_backward)
