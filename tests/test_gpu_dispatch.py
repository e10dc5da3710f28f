"""Which path CUDA tensors take, and what is said where there is none."""

import types

import pytest
import torch

import normalign
from normalign import _dispatch, _gpu, _load
from normalign.testing import emulated_gpu, gpu_devices

CUDA = torch.device("cuda:0")
needs_emulator = pytest.mark.skipif("emulated" not in gpu_devices(), reason="not built")


@pytest.fixture
def built_for(monkeypatch):
    """As if the CUDA module had been built for these architectures."""

    def build(names, runtime=13000, driver=13010):
        module = types.SimpleNamespace(
            architectures=names, runtime_version=lambda: runtime, driver_version=lambda: driver
        )
        monkeypatch.setattr(_load, "_cuda", module)
        monkeypatch.setattr(_load, "cuda_error", None)
        _gpu._device_reason.cache_clear()

    yield build
    _gpu._device_reason.cache_clear()


@pytest.mark.parametrize(
    ("built", "found", "reason"),
    [
        ("80,90,100", (9, 0), None),
        ("80,90,100", (8, 6), None),  # machine code of sm_80 runs on its own major version
        ("80,90", (12, 0), None),  # PTX of the newest serves what comes after it
        ("80,90,100", (7, 5), r"were built for sm_80, sm_90, sm_100, and cuda:0 is sm_75"),
        ("90", (8, 0), r"were built for sm_90, and cuda:0 is sm_80"),
        ("86", (8, 0), r"were built for sm_86, and cuda:0 is sm_80"),
    ],
)
def test_architecture_of_the_device(built_for, monkeypatch, built, found, reason):
    built_for(built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found)
    got = _gpu.unavailable_reason(CUDA)
    if reason is None:
        assert got is None
    else:
        assert reason in got


@pytest.mark.parametrize(
    ("runtime", "driver", "reason"),
    [
        (13000, 12080, "were built with CUDA 13.0, and the driver is for CUDA 12.8"),
        (12080, 12040, None),  # minor versions are compatible
        (12080, 13000, None),
    ],
)
def test_version_of_the_driver(built_for, monkeypatch, runtime, driver, reason):
    """Torch may run on a driver for which our kernels are too new."""
    built_for("90", runtime, driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    got = _gpu.unavailable_reason(CUDA)
    if reason is None:
        assert got is None
    else:
        assert reason in got


def test_the_reason_of_a_missing_build(monkeypatch):
    monkeypatch.setattr(_load, "_cuda", None)
    monkeypatch.setattr(_load, "cuda_error", "the CUDA kernels are not built: NORMALIGN_CUDA=OFF")
    assert "not built: NORMALIGN_CUDA=OFF" in _gpu.unavailable_reason(CUDA)
    assert "not built" in _gpu.status()
    assert "no CUDA kernel for device meta" in _gpu.unavailable_reason(torch.device("meta"))


def test_status_without_a_driver(built_for, monkeypatch):
    built_for("80,90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _gpu.status() == "sm_80, sm_90; torch finds no usable GPU"


def test_cpu_tensors_are_no_matter_of_the_gpu():
    x = torch.zeros(2, 3)
    assert not _gpu.serves(x.device)
    assert _dispatch.gpu_module(x) is None
    assert _gpu.where(x.device) == (0, 0)


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_and_float64_take_the_kernels(dtype, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", "native")
    with emulated_gpu():
        before = _load._emu.launches()
        normalign.orthogonal_projection(*torch.randn(2, 3, 4, dtype=dtype))
        assert _load._emu.launches() == before + 1


@needs_emulator
def test_what_takes_the_reference(monkeypatch):
    half = torch.randn(2, 3, 4).bfloat16()
    with emulated_gpu():
        before = _load._emu.launches()
        normalign.orthogonal_projection(*half)
        with monkeypatch.context() as patch:
            patch.setenv("NORMALIGN_IMPL", "reference")
            normalign.orthogonal_projection(*torch.randn(2, 3, 4))
        assert _load._emu.launches() == before
        assert "bfloat16" in _dispatch.gpu_unavailable_reason(half)
        x = torch.zeros(2)
        assert _dispatch.gpu_unavailable_reason(x, x.to("meta")) == "tensors are on cpu and meta"


@needs_emulator
def test_emulation_ends_with_its_block():
    with pytest.raises(KeyError), emulated_gpu():
        raise KeyError
    assert not _gpu.emulating
