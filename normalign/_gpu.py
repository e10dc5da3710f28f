"""The CUDA kernels: which module has them, whether it can serve these tensors, and the stream.

A test may put the emulated kernels in their place (``normalign.testing.emulated_gpu``): CPU tensors
then take every path that CUDA tensors take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from normalign import _load

emulating = False


def _built() -> list[int]:
    """Architectures of the build, as 90 for sm_90."""
    assert _load._cuda is not None
    return [int(name) for name in _load._cuda.architectures.split(",")]


@functools.cache
def _device_reason(index: int) -> str | None:
    """Why this GPU can't run the kernels that were built."""
    assert _load._cuda is not None
    runtime, driver = _load._cuda.runtime_version(), _load._cuda.driver_version()
    if driver // 1000 < runtime // 1000:  # as 12080; a driver runs all of its own major version
        made, served = (f"CUDA {v // 1000}.{v % 1000 // 10}" for v in (runtime, driver))
        return f"the CUDA kernels were built with {made}, and the driver is for {served}"
    built = _built()
    major, minor = torch.cuda.get_device_capability(index)
    found = 10 * major + minor
    # Machine code runs on the same major version from its minor on; PTX of the newest runs later.
    if any(b // 10 == major and b <= found for b in built) or max(built) <= found:
        return None
    names = ", ".join(f"sm_{b}" for b in built)
    return f"the CUDA kernels were built for {names}, and cuda:{index} is sm_{found}"


@functools.cache
def _tensor_cores(index: int) -> bool:
    major, minor = torch.cuda.get_device_capability(index)
    # What runs is the newest code that this GPU can run.
    return max((b for b in _built() if b <= 10 * major + minor), default=0) >= 80


def tensor_cores(device: torch.device) -> bool:
    """Whether the kernels that run on this device may use tf32 and bf16 products.

    Call where ``unavailable_reason`` is None.
    """
    return device.type != "cuda" or _tensor_cores(device.index or 0)


def serves(device: torch.device) -> bool:
    """Whether tensors of this device are a matter for CUDA kernels, available or not."""
    return device.type == "cuda" or (emulating and device.type == "cpu")


def unavailable_reason(device: torch.device) -> str | None:
    """Why no CUDA kernel can run on this device; ``None`` when they can."""
    if emulating and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no CUDA kernel for device {device}"
    return _load.cuda_error or _device_reason(device.index or 0)


def module(device: torch.device) -> Any:
    """The module that runs kernels on this device."""
    return _load._cuda if device.type == "cuda" else _load._emu


def suffix(like: Tensor) -> str:
    """What the names of kernels for this dtype end with."""
    return "f64" if like.dtype is torch.float64 else "f32"


def where(device: torch.device) -> tuple[int, int]:
    """Device number and torch's current stream on it: the last two arguments of every launch."""
    if device.type != "cuda":
        return 0, 0
    index = device.index or 0
    return index, torch.cuda.current_stream(index).cuda_stream


def status() -> str:
    """The architectures that were built, or why there are no kernels."""
    if _load._cuda is None:
        return _load.cuda_error or "none"
    names = ", ".join(f"sm_{b}" for b in _built())
    if not torch.cuda.is_available():
        return f"{names}; torch finds no usable GPU"
    reasons = [_device_reason(i) for i in range(torch.cuda.device_count())]
    return "; ".join([names, *(reason for reason in reasons if reason)])
