"""Argument checks; every message says what, what was expected, and what came."""

from __future__ import annotations

import torch
from torch import Tensor


def check_float(name: str, tensor: Tensor) -> None:
    """Requires a real floating-point tensor."""
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
        raise TypeError(msg)
    if not tensor.is_floating_point():
        msg = f"{name} must have a floating-point dtype, got {tensor.dtype}"
        raise TypeError(msg)


def check_like(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Requires the dtype and device of ``like``."""
    if tensor.dtype != like.dtype:
        msg = f"{name} must have the dtype of {like_name}, {like.dtype}, got {tensor.dtype}"
        raise TypeError(msg)
    if tensor.device != like.device:
        msg = f"{name} must be on the device of {like_name}, {like.device}, got {tensor.device}"
        raise ValueError(msg)


def check_shape(name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """Requires a shape; ``None`` stands for any size."""
    shape = tensor.shape
    if len(shape) == len(expected):
        for size, e in zip(shape, expected, strict=True):
            if e is not None and size != e:
                break
        else:
            return
    text = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
    msg = f"{name} must have shape {text}, got {tuple(shape)}"
    raise ValueError(msg)


def check_positive(name: str, value: float) -> None:
    """Requires a finite number above zero."""
    if not (value > 0 and value < float("inf")):
        msg = f"{name} must be positive and finite, got {value}"
        raise ValueError(msg)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Requires an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{name} must be an integer of at least {least}, got {value!r}"
        raise ValueError(msg)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Requires one of ``choices``."""
    if value not in choices:
        msg = f"{name} must be one of {', '.join(choices)}, got {value!r}"
        raise ValueError(msg)


def is_strided(tensor: Tensor) -> bool:
    """Whether the tensor has ordinary memory (not sparse, nested or quantised)."""
    return tensor.layout is torch.strided
