"""GrokAlignLoss on the GPU: the kernels take the task loss and the means along, in six launches."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import normalign
from normalign import _load, reference
from normalign.testing import DTYPES, gpu_devices, on_gpu

CRITERIA = (nn.CrossEntropyLoss, nn.MSELoss)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _model(inputs, outputs, device, dtype=torch.float32, activation=nn.ReLU):
    layers = nn.Linear(inputs, 9), activation(), nn.Linear(9, outputs)
    return nn.Sequential(*layers).to(device=device, dtype=dtype)


def _target(criterion, batch, outputs, dtype, device):
    if isinstance(criterion, nn.MSELoss):
        return torch.randn(batch, outputs, dtype=dtype, device=device)
    return torch.randint(outputs, (batch,), device=device)


def _exact(model, x, probes, penalty, criterion, y, weight):
    model = copy.deepcopy(model).double()
    logits, value = reference.grokalign(model, x.double(), probes.double(), penalty, "mean")
    task = criterion(logits, y.double() if y.is_floating_point() else y)
    total = task + weight * value
    return logits, task, value, total, torch.autograd.grad(total, list(model.parameters()))


def _check(
    model, x, y, criterion, penalty="orthogonal", weight=0.3, probes=1, factor=1.0, launches=4
):
    outputs = model[-1].out_features
    v = torch.randn(probes, x.shape[0], outputs, dtype=x.dtype, device=x.device)
    loss_fn = normalign.GrokAlignLoss(
        criterion, weight, penalty=penalty, implementation="native", check_finite=False
    )
    before = _load._emu.launches() if x.device.type == "cpu" else 0
    total = loss_fn(model, x, y, probe_vectors=v)
    grads = torch.autograd.grad(factor * total, list(model.parameters()))
    if x.device.type == "cpu":
        assert _load._emu.launches() - before == launches  # the task loss was ours
    exact = _exact(model, x, v, penalty, criterion, y, weight)
    # Sums over widths and rows of products through a few layers: some tens of roundings.
    tolerance = 2e-5 if x.dtype is torch.float32 else 1e-12
    for got, want in zip((*loss_fn.last, total.detach()), exact[:4], strict=True):
        assert got.dtype is x.dtype
        assert (got.double() - want).abs().max().item() <= tolerance * (1e-3 + want.abs().max())
    for got, want in zip(grads, exact[4], strict=True):
        want = factor * want
        assert (got.double() - want).abs().max().item() <= tolerance * (1e-3 + want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("penalty", ["orthogonal", "jacobian"])
def test_follows_the_definition(device, dtype, criterion, penalty):
    x = torch.randn(13, 5, dtype=dtype, device=device)
    model = _model(5, 3, device, dtype, nn.Tanh)
    y = _target(criterion(), 13, 3, dtype, device)
    _check(model, x, y, criterion(), penalty, probes=2, factor=0.7)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    ("batch", "outputs"), [(1, 1), (1, 31), (8, 32), (9, 33), (31, 2), (257, 3)]
)
def test_sizes(device, criterion, batch, outputs):
    x = torch.randn(batch, 14, dtype=torch.float64, device=device)[:, ::2]
    y = _target(criterion(), batch, outputs, torch.float64, device)
    _check(_model(7, outputs, device, torch.float64), x, y, criterion())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_large_row_blocks(device, criterion):
    """From 2080 samples on a block has 16 rows, and many blocks share the means."""
    x = torch.randn(2083, 3, dtype=torch.float64, device=device)
    y = _target(criterion(), 2083, 2, torch.float64, device)
    _check(_model(3, 2, device, torch.float64), x, y, criterion())


def test_one_layer(device):
    x = torch.randn(9, 3, dtype=torch.float64, device=device)
    model = nn.Sequential(nn.Linear(3, 2)).to(x)
    _check(model, x, torch.arange(9, device=device) % 2, nn.CrossEntropyLoss(), launches=3)


def test_ignored_classes(device):
    x = torch.randn(11, 5, dtype=torch.float64, device=device)
    y = torch.arange(11, device=device) % 3
    model = _model(5, 3, device, torch.float64)
    _check(model, x, torch.where(y == 1, -100, y), nn.CrossEntropyLoss())
    _check(model, x, y, nn.CrossEntropyLoss(ignore_index=2))
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.3, implementation="native")
    total = loss_fn(model, x, torch.full_like(y, -100))
    assert torch.isnan(total)  # as torch has it
    total.backward()
    assert torch.isfinite(model[0].weight.grad).all()


def test_a_class_out_of_range_is_nan(device):
    model = _model(5, 3, device)
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.3, implementation="native")
    y = torch.tensor([0, 3, 1], device=device)
    assert torch.isnan(loss_fn(model, torch.randn(3, 5, device=device), y))


def test_negated_views(device):
    """Tensors whose memory holds the negative of their values, as imaginary parts may be."""
    model = _model(5, 3, device, torch.float64)
    x, values = torch.randn(2, 6, 5, dtype=torch.float64, device=device)
    y = torch._neg_view(values[:, :3].contiguous())
    assert y.is_neg()
    _check(model, torch._neg_view(x), y, nn.MSELoss())
    v = torch.randn(1, 6, 3, dtype=torch.float64, device=device)
    wanted = [model[0].weight, model[0].bias]
    results = []
    for turn in (torch._neg_view, lambda t: torch._neg_view(t).resolve_neg()):
        logits, value = normalign.grokalign(model, x, probe_vectors=v, reduction="none")
        cotangents = [turn(torch.ones_like(t)) for t in (logits, value)]
        results.append(torch.autograd.grad((logits, value), wanted, cotangents))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_what_the_kernels_do_not_take_is_torchs(device):
    """Class probabilities, and the joint penalty."""
    x, model = torch.randn(6, 5, device=device), _model(5, 3, device)
    y = torch.rand(6, 3, device=device).softmax(1)
    v = torch.randn(1, 6, 3, device=device)
    for target, penalty in ((y, "orthogonal"), (y.argmax(1), "joint")):
        loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.3, penalty=penalty)
        total = loss_fn(model, x, target, probe_vectors=v)
        logits, value = normalign.grokalign(model, x, penalty=penalty, probe_vectors=v)
        want = F.cross_entropy(logits, target) + 0.3 * value
        torch.testing.assert_close(total, want)


class _Launching(TorchDispatchMode):
    """Counts torch's operators that start a kernel on a GPU: all but views and allocations."""

    FREE = ("empty", "detach", "view", "alias", "as_strided", "reshape", "select", "unbind")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.name().removeprefix("aten::").split(".")[0]
        if not any(free in name for free in self.FREE):
            self.names.append(name)
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("widths", [[43, 200, 200, 2], [122, 256, 61], [784, 20, 20, 20, 10]])
def test_a_step_is_six_launches(criterion, widths):
    """Torch's own included: the probes, and the gradient 1 that the backward pass starts from."""
    if "emulated" not in gpu_devices():
        pytest.skip("launches are counted by the emulated kernels")
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]
    x, y = torch.randn(3, widths[0]), _target(criterion(), 3, widths[-1], torch.float32, "cpu")
    loss_fn = normalign.GrokAlignLoss(criterion(), 0.1, check_finite=False)
    with on_gpu("emulated"):
        loss_fn(model, x, y).backward()
        before = _load._emu.launches()
        with _Launching() as torchs:
            model.zero_grad(set_to_none=True)
            loss_fn(model, x, y).backward()
        assert torchs.names == ["randn", "ones_like"]
        assert _load._emu.launches() - before + len(torchs.names) <= 6
