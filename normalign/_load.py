"""Imports the compiled extension, and keeps the reason when that fails.

torch is imported first: both then share one OpenMP runtime, so kernels use torch's thread pool
and do not compete with it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def _import(name: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(f"normalign.{name}"), None
    except ImportError as error:
        built_for = f"Python ABI and libraries found by torch {torch.__version__}"
        return None, f"normalign.{name} could not be loaded ({built_for}): {error}"


def _import_cuda() -> tuple[Any, str | None]:
    built = _C.cuda_build if _C is not None else "unknown: normalign._C is missing"
    if not built.startswith("sm_"):
        return None, f"the CUDA kernels are {built}"
    return _import("_cuda")


_C, cpu_error = _import("_C")
_cuda, cuda_error = _import_cuda()
_emu: Any = None  # the CUDA kernels on the host: loaded by normalign.testing only
