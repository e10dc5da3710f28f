"""Imports the compiled extension, and keeps the reason when that fails; addresses for its calls.

torch is imported first: both then share one OpenMP runtime, so kernels use torch's thread pool
and do not compete with it.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor


def _import(name: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(f"normalign.{name}"), None
    except ImportError as error:
        return None, f"normalign.{name} could not be loaded: {error}{_hint()}"


def _hint() -> str:
    """What is usual when the extension is missing: an unbuilt source tree that is imported."""
    package = pathlib.Path(__file__).parent
    if not (package.parent / "CMakeLists.txt").exists():
        return f" (this is torch {torch.__version__}, Python {sys.version.split()[0]})"
    return (
        f" (the source tree at {package.parent} is imported, in place of an installed package: "
        "run from another folder, or build in place with make dev)"
    )


def _import_cuda() -> tuple[Any, str | None]:
    built = _C.cuda_build if _C is not None else "unknown: normalign._C is missing"
    if not built.startswith("sm_"):
        return None, f"the CUDA kernels are {built}"
    return _import("_cuda")


_C, cpu_error = _import("_C")
_cuda, cuda_error = _import_cuda()
_emu: Any = None  # the CUDA kernels on the host: loaded by normalign.testing only


def address(tensor: Tensor | None) -> int:
    """Where its memory begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
