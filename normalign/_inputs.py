"""Checks of what ``grokalign`` is given, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _probes
from normalign._checks import check_choice, check_count, check_shape, is_strided

PENALTIES = ("orthogonal", "jacobian", "joint")
REDUCTIONS = ("mean", "none")
IMPLEMENTATIONS = ("auto", "native", "general", "reference")

_known_options: set[tuple[Any, ...]] = set()


def check_options(
    penalty: str, num_probes: int, probes: str, exact: bool, reduction: str, implementation: str
) -> None:
    """Requires known options; a combination that has passed once is only looked up."""
    key = (penalty, num_probes, probes, exact, reduction, implementation)
    if not torch.compiler.is_compiling():
        if type(num_probes) is int and key in _known_options:
            return
    check_choice("penalty", penalty, PENALTIES)
    check_choice("probes", probes, _probes.KINDS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_count("num_probes", num_probes)
    if exact and num_probes != 1:
        msg = f"num_probes must be 1 with exact=True, which uses every row of J, got {num_probes}"
        raise ValueError(msg)
    if not torch.compiler.is_compiling():
        _known_options.add(key)


def check_x(x: Tensor) -> None:
    """Requires a dense floating-point batch."""
    if not isinstance(x, Tensor):
        msg = f"x must be a torch.Tensor, got {type(x).__name__}"
        raise TypeError(msg)
    if not x.is_floating_point():
        msg = (
            f"x must have a floating-point dtype, got {x.dtype}. Integers have no gradient: pass "
            "what the model makes of them, such as token embeddings, as x, and let forward= run "
            "the rest of the model"
        )
        raise TypeError(msg)
    if x.dim() < 2 or x.shape[0] == 0:
        msg = f"x must have shape (batch, ...) with at least one sample, got {tuple(x.shape)}"
        raise ValueError(msg)
    if not is_strided(x):
        msg = f"x must be dense (torch.strided), got {x.layout}"
        raise TypeError(msg)


def check_finite(x: Tensor) -> None:
    """Requires that no entry is NaN or infinite.

    The sum is finite unless an entry is not, or it overflows: only then is every entry looked at.
    """
    total = (x.detach() if x.requires_grad else x).sum().item()
    if not math.isfinite(total):
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            msg = f"x must be finite, got {bad} entries of NaN or infinity"
            raise ValueError(msg)


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast converts on this device; devices that do not know it count as off."""
    known = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def check_model(model: Any, x: Tensor) -> None:
    """Requires that some parameter is where ``x`` is, and has its dtype.

    Not under autocast, and not for a ``forward`` callable: both may convert.
    """
    if not isinstance(model, nn.Module) or autocast_is_on(x.device.type):
        return
    other: Tensor | None = None
    for parameter in model.parameters():
        if parameter.device == x.device and parameter.dtype == x.dtype:
            return
        if parameter.is_floating_point():
            other = parameter
    if other is None:
        return
    found = f"no parameter like that, but {other.dtype} on {other.device}"
    msg = (
        f"x must have the dtype and device of the model: x is {x.dtype} on {x.device}, got {found}"
    )
    raise ValueError(msg + "; forward= can convert x for a model that does so itself")


def check_probes(vectors: Tensor, batch: int, outputs: int, device: torch.device) -> Tensor:
    """Requires probes ``(P, B, c)`` on the device of the logits."""
    check_shape("probe_vectors", vectors, (None, batch, outputs))
    if vectors.shape[0] == 0:
        msg = "probe_vectors must hold at least one probe, got 0"
        raise ValueError(msg)
    if not vectors.is_floating_point():
        msg = f"probe_vectors must have a floating-point dtype, got {vectors.dtype}"
        raise TypeError(msg)
    if vectors.device != device:
        msg = f"probe_vectors must be on the device of the logits, {device}, got {vectors.device}"
        raise ValueError(msg)
    return vectors.detach()


def make_select(output: Any) -> Callable[[Any], Tensor]:
    """The function that takes the logits out of what a model returns."""
    if callable(output):
        return output  # type: ignore[no-any-return]

    def select(result: Any) -> Tensor:
        if output is None:
            return result  # type: ignore[no-any-return]
        if isinstance(output, str) and not isinstance(result, dict) and hasattr(result, output):
            return getattr(result, output)  # type: ignore[no-any-return]
        try:
            return result[output]  # type: ignore[no-any-return]
        except (KeyError, IndexError, TypeError) as error:
            has = list(result) if isinstance(result, dict) else type(result).__name__
            msg = f"output={output!r} is not in what the model returned: {has}"
            raise ValueError(msg) from error

    return select
