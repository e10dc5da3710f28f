"""Decides, for each call, between a native kernel and the reference, and says why.

``NORMALIGN_IMPL`` is ``auto`` (native where possible), ``native`` (raise with the reason where it
is not) or ``reference``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from normalign import _gpu, _load

IMPLEMENTATIONS = ("auto", "native", "reference")
NATIVE_DTYPES = (torch.float32, torch.float64)


def implementation(override: str | None = None) -> str:
    """The requested implementation: ``override``, or ``NORMALIGN_IMPL``, or ``auto``."""
    value = override or os.environ.get("NORMALIGN_IMPL", "auto")
    if value not in IMPLEMENTATIONS:
        name = "implementation" if override else "NORMALIGN_IMPL"
        expected = ", ".join(IMPLEMENTATIONS)
        msg = f"{name} must be one of {expected}, got {value!r}"
        raise ValueError(msg)
    return value


def unavailable_reason(*tensors: Tensor) -> str | None:
    """Why no native CPU kernel can take these tensors; ``None`` when one can."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return gpu_unavailable_reason(*tensors) or "this operator has no CUDA kernel"
        if tensor.device.type != "cpu":
            return f"no native kernel for device {tensor.device}"
        if tensor.dtype not in NATIVE_DTYPES:
            return f"no native kernel for {tensor.dtype}"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} is a tensor subclass without plain memory"
    return _load.cpu_error


def gpu_unavailable_reason(*tensors: Tensor) -> str | None:
    """Why no CUDA kernel can take these tensors; ``None`` when one can."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:  # a kernel would take an address of the host for one of its own
            return f"tensors are on {device} and {tensor.device}"
        if tensor.dtype not in NATIVE_DTYPES:
            return f"no native kernel for {tensor.dtype}"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} is a tensor subclass without plain memory"
    return _gpu.unavailable_reason(device)


def gpu_module(*tensors: Tensor, override: str | None = None) -> Any:
    """The module with the CUDA kernels where these tensors are to take them, else ``None``.

    An operator with a CUDA kernel asks this first, and then ``reference_reason``, which also says
    why there was none.
    """
    if not _gpu.serves(tensors[0].device) or implementation(override) == "reference":
        return None
    if gpu_unavailable_reason(*tensors) is not None:
        return None
    return _gpu.module(tensors[0].device)


def reference_reason(*tensors: Tensor, override: str | None = None) -> str | None:
    """Why the reference is to be used; ``None`` means native.

    Raises:
        RuntimeError: native was asked for and is not available; the message holds the reason.
    """
    wanted = implementation(override)
    if wanted == "reference":
        return "the reference was asked for"
    reason = unavailable_reason(*tensors)
    if reason is not None and wanted == "native":
        msg = f"the native implementation was asked for, but {reason}"
        raise RuntimeError(msg)
    return reason


def threads() -> int:
    """How many threads a kernel may use: what torch uses."""
    return torch.get_num_threads()
