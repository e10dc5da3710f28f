"""What this installation is, and which code paths it can use."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from normalign import _dispatch, _gpu, _load


def _version() -> str:
    try:
        return importlib.metadata.version("normalign")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled source tree"


def _openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes in this process; more than one means competing pools."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "omp" in line.rpartition("/")[2]}
    except OSError:  # not Linux
        return []
    return sorted(path for path in paths if path.startswith("/"))


def config() -> dict[str, Any]:
    """The facts that ``show_config`` prints, as a dictionary."""
    native = _load._C
    return {
        "normalign": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu native": "yes" if native else f"no: {_load.cpu_error}",
        "instruction set": native.isa() if native else "none",
        "best instruction set": native.best_isa() if native else "none",
        "threads": torch.get_num_threads(),
        "openmp": native.openmp() if native else 0,
        "openmp runtimes": _openmp_runtimes(),
        "cuda kernels": _gpu.status(),
        "torch cuda": torch.version.cuda or "no",
        "implementation": _dispatch.implementation(),
    }


def show_config() -> None:
    """Prints version, torch, instruction set, OpenMP, CUDA, and why a native path is off."""
    for key, value in config().items():
        text = "\n".join(value) if isinstance(value, list) else str(value)
        print(f"{key:22}{text.replace(chr(10), chr(10) + ' ' * 22)}")
