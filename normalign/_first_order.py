"""Marks the backward of an autograd function as one that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MESSAGE = (
    "the fused GrokAlign stack can be differentiated once only, and a second derivative of it was "
    'asked for: pass implementation="general" to grokalign or GrokAlignLoss'
)
Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Makes a second derivative an error.

    ``once_differentiable`` of torch does so only where the incoming gradient requires a gradient;
    elsewhere the second derivative would silently lack what flows through the saved parameters.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        places = [i for i, t in enumerate(results) if t is not None]
        if not places:
            return results
        error = torch._C._functions.DelayedError(_MESSAGE, len(places))
        guarded = error(*(t.detach().requires_grad_() for t in results if t is not None))
        guarded = guarded if isinstance(guarded, tuple) else (guarded,)
        found = list(results)
        for i, t in zip(places, guarded, strict=True):
            found[i] = t
        return tuple(found)

    return wrapped
