"""Registers operators under ``normalign::`` so that torch.compile and opcheck see them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("normalign", "DEF")


def register(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Defines ``normalign::name`` and returns it, callable.

    Args:
        name: Operator name.
        schema: Arguments and results, as in ``"(Tensor g, Tensor x) -> Tensor"``.
        impl: Computes the result on any device; it asks ``_dispatch`` for native or reference.
        fake: Shapes and dtypes of the result, for tracing.
        backward: The vector-Jacobian product, if the operator is differentiable.
        setup_context: Saves what ``backward`` needs.
        tags: What a compiler must know, such as that two calls differ.
    """
    LIBRARY.define(name + schema, tags=tags)
    LIBRARY.impl(name, impl, "CPU")
    LIBRARY.impl(name, impl, "CUDA")
    qualified = f"normalign::{name}"
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=LIBRARY
        )
    return getattr(torch.ops.normalign, name).default
