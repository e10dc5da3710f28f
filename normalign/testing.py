"""Helpers of the test suite: awkward layouts, tolerances with reasons, and hiding the extension."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normalign import _gpu, _load

# Around one and two vectors of every instruction set, a prime, and the degenerate sizes.
SIZES = (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 97)
DTYPES = (torch.float32, torch.float64)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: _inside(t),
    "expanded": lambda t: t[:1].expand_as(t),
}


def _inside(t: Tensor) -> Tensor:
    """The same values as a view into a larger buffer, at an odd offset and stride."""
    buffer = t.new_full((t.shape[0] + 2, t.shape[1] + 5), float("nan"))
    view = buffer[1 : 1 + t.shape[0], 3 : 3 + t.shape[1]]
    view.copy_(t)
    return view


def isa_names() -> list[str]:
    """The instruction sets that this machine can run."""
    if _load._C is None:
        return []
    order = ["base", "avx2", "avx512"]
    return order[: order.index(_load._C.best_isa()) + 1]


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Runs the body with one instruction set."""
    assert _load._C is not None
    before = _load._C.isa()
    if not _load._C.select_isa(name):
        msg = f"the instruction set {name} is not supported here"
        raise RuntimeError(msg)
    try:
        yield
    finally:
        _load._C.select_isa(before)


@contextlib.contextmanager
def hide_native() -> Iterator[None]:
    """Runs the body as if the extension had failed to load."""
    module, error = _load._C, _load.cpu_error
    _load._C, _load.cpu_error = None, "normalign._C is hidden"
    try:
        yield
    finally:
        _load._C, _load.cpu_error = module, error


def load_emulator() -> str | None:
    """Loads the emulated CUDA kernels, once; returns why they are missing.

    ``NORMALIGN_EMU_MODULE`` names another build of them, such as one with a sanitizer.
    """
    if _load._emu is not None:
        return None
    path = os.environ.get("NORMALIGN_EMU_MODULE")
    if path is None:
        _load._emu, error = _load._import("_emu")
        return error
    spec = importlib.util.spec_from_file_location("normalign._emu", path)
    assert spec is not None
    assert spec.loader is not None
    _load._emu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_load._emu)
    return None


@contextlib.contextmanager
def emulated_gpu() -> Iterator[None]:
    """Runs the body with the CUDA kernels on the host: CPU tensors take them."""
    error = load_emulator()
    if error is not None:
        raise RuntimeError(error)
    before, _gpu.emulating = _gpu.emulating, True
    try:
        yield
    finally:
        _gpu.emulating = before


def gpu_devices() -> list[str]:
    """Where the tests of CUDA kernels run: on the host machine if it was built, and on a GPU.

    With ``NORMALIGN_NEED_EMU=1`` a missing host machine is an error.
    """
    error = load_emulator()
    if error is not None and os.environ.get("NORMALIGN_NEED_EMU") == "1":
        raise RuntimeError(error)
    devices = [] if error is not None else ["emulated"]
    if torch.cuda.is_available() and _load._cuda is not None:
        devices.append("cuda")
    return devices


@contextlib.contextmanager
def on_gpu(device: str) -> Iterator[torch.device]:
    """Runs the body on a device of ``gpu_devices``; yields the device of its tensors."""
    if device == "cuda":
        yield torch.device("cuda")
        return
    with emulated_gpu():
        yield torch.device("cpu")


def assert_as_accurate(
    native: Tensor,
    reference: Tensor,
    exact: Tensor,
    factor: float = 4.0,
    floor: float = 4.0,
    scale: float | None = None,
) -> None:
    """Native may err at most ``factor`` times as much as the reference does.

    Both are compared with ``exact``, in float64. Summation order differs, so equality can't be
    asked; ``floor`` units of the dtype's epsilon, relative to ``scale`` (by default the largest
    exact value; give the inputs' size where results cancel), cover the case where the reference
    happens to be right.
    """
    assert native.shape == exact.shape
    assert native.dtype == reference.dtype
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isnan(native), torch.isnan(exact)), "NaN was hidden or invented"
    if not finite.any():
        return
    if scale is None:
        scale = exact[finite].abs().max().item()
    native_error = (native.double() - exact)[finite].abs().max().item()
    reference_error = (reference.double() - exact)[finite].abs().max().item()
    bound = factor * reference_error + floor * torch.finfo(native.dtype).eps * scale
    assert native_error <= bound, f"error {native_error:.3g} exceeds {bound:.3g}"
