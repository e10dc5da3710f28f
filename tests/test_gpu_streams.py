"""Every launch goes to the tensors' device and to torch's current stream there."""

import types

import pytest
import torch
from torch import nn

import normalign
from normalign import _gpu, _load, _rfam_cuda, _rfam_fit, _rfam_pgd, _stack_cuda
from normalign.testing import gpu_devices, on_gpu

needs_emulator = pytest.mark.skipif("emulated" not in gpu_devices(), reason="not built")
DEVICE, STREAM = 2, 0x5EED0


def _projection():
    g, x = torch.randn(2, 6, 5)
    g.requires_grad_()
    r, norms = normalign.orthogonal_projection(g, x)
    (r.sum() + norms.sum()).backward()


def _step(penalty="orthogonal"):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    logits, value = normalign.grokalign(model, torch.randn(5, 4), penalty=penalty)
    (logits.square().sum() + value).backward()


def _wide_step(monkeypatch):
    monkeypatch.setattr(_stack_cuda, "_Small", _stack_cuda.WideStep)
    _step()


def _kernel_machine():
    x, y = torch.randn(20, 3), torch.eye(2)[torch.arange(20) % 2]
    machine = _rfam_fit.fit(x, y, reg=0.1, n_iter=2).machine
    machine.decision(x)
    machine.input_gradient(x, y)
    _rfam_pgd.pgd(machine, x, y, eps=0.1, step=0.1, iters=2)


CALLS = {
    "projection": _projection,
    "small stack": _step,
    "wide stack": _wide_step,
    "joint penalty": lambda: _step("joint"),
    "kernel machine": _kernel_machine,
}


@needs_emulator
@pytest.mark.parametrize("name", CALLS)
def test_every_launch_is_on_that_device_and_stream(name, monkeypatch):
    emu = _load._emu
    monkeypatch.setattr(_gpu, "where", lambda device: (DEVICE, STREAM))
    with on_gpu("emulated"):
        before = emu.launches()
        CALLS[name](monkeypatch) if name == "wide stack" else CALLS[name]()
        ran = range(before, emu.launches())
        assert len(ran) > 1
        assert {emu.launched_on(k) for k in ran} == {(DEVICE, STREAM)}
        assert emu.current_device() == 0


@needs_emulator
def test_the_device_before_comes_back_after_a_failed_launch(monkeypatch):
    emu = _load._emu
    u = torch.randn(3, 2)
    monkeypatch.setattr(_gpu, "where", lambda device: (DEVICE, STREAM))
    with on_gpu("emulated"):
        with monkeypatch.context() as patch:
            patch.setenv("NORMALIGN_EMU_ORDER", "sideways")
            with pytest.raises(RuntimeError, match="NORMALIGN_EMU_ORDER"):
                _rfam_cuda.gram(u, u, 1.0, 1.0)
        assert emu.current_device() == 0
        before = emu.launches()
        monkeypatch.setattr(_gpu, "where", lambda device: (99, STREAM))
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            _rfam_cuda.gram(u, u, 1.0, 1.0)
        assert emu.launches() == before


def test_the_stream_is_torchs_current_one(monkeypatch):
    asked = []

    def current_stream(index):
        asked.append(index)
        return types.SimpleNamespace(cuda_stream=STREAM)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert _gpu.where(torch.device("cuda", 1)) == (1, STREAM)
    assert asked == [1]


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_a_side_stream_gives_the_same():
    u = torch.randn(300, 5, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = _rfam_cuda.gram(u, u, 2.0, 1.0)
    side.synchronize()
    assert torch.equal(got, _rfam_cuda.gram(u, u, 2.0, 1.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_gives_the_same():
    u = torch.randn(300, 5, device="cuda:1")
    got = _rfam_cuda.gram(u, u, 2.0, 1.0)
    assert torch.cuda.current_device() == 0
    assert torch.equal(got.cpu(), _rfam_cuda.gram(u.to("cuda:0"), u.to("cuda:0"), 2.0, 1.0).cpu())
