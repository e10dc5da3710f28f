"""The fused stack on the GPU: small stacks in four launches, wide ones around torch's products."""

import copy

import pytest
import torch
from torch import nn

import normalign
from normalign import _load, _stack_cuda, reference
from normalign.testing import DTYPES, gpu_devices, on_gpu

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": lambda: nn.Softplus(beta=2.0, threshold=1.0),
}


class Square(nn.Module):
    """The network of modular addition: no bias, squared activation."""

    def __init__(self, widths):
        super().__init__()
        self.first = nn.Linear(widths[0], widths[1], bias=False)
        self.second = nn.Linear(widths[1], widths[2], bias=False)

    def forward(self, x):
        return self.second(self.first(x).square())


def _mlp(widths, activation="relu", bias=True):
    layers = []
    for i in range(len(widths) - 1):
        layers.append(nn.Linear(widths[i], widths[i + 1], bias=bias))
        if i + 2 < len(widths):
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


@pytest.fixture(params=["small", "wide"])
def way(request, monkeypatch):
    """Both ways must serve any stack: a wide one is only slower on a small stack."""
    if request.param == "wide":
        monkeypatch.setattr(_stack_cuda, "_Small", _stack_cuda.WideStep)
    return request.param


def _exact(model, x, probes, penalty, reduction, of_logits, of_penalty):
    """Values and gradients by double backward, in float64."""
    model = copy.deepcopy(model).double()
    logits, value = reference.grokalign(model, x.double(), probes.double(), penalty, reduction)
    total = 0.0
    if of_logits is not None:
        total = total + (logits * of_logits.double()).sum()
    if of_penalty is not None:
        total = total + (value * of_penalty.double()).sum()
    grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return logits, value, grads


def _check(model, x, probes, penalty="orthogonal", reduction="mean", parts="both"):
    model = model.to(device=x.device, dtype=x.dtype)
    of_logits = torch.randn(x.shape[0], probes.shape[2], dtype=x.dtype, device=x.device)
    of_logits = of_logits if parts != "penalty" else None
    of_penalty = None
    if parts != "logits":
        shape = () if reduction == "mean" else (x.shape[0],)
        of_penalty = 0.5 + torch.rand(shape, dtype=x.dtype, device=x.device)
    logits, value = normalign.grokalign(
        model, x, penalty=penalty, probe_vectors=probes, reduction=reduction,
        implementation="native",
    )  # fmt: skip
    total = 0.0
    if of_logits is not None:
        total = total + (logits * of_logits).sum()
    if of_penalty is not None:
        total = total + (value * of_penalty).sum()
    # A last bias that only the penalty could reach gets zeros here, None from autograd.
    grads = torch.autograd.grad(total, list(model.parameters()))
    exact = _exact(model, x, probes, penalty, reduction, of_logits, of_penalty)
    # Sums over widths and rows of products through a few layers: some tens of roundings.
    tolerance = 2e-5 if x.dtype is torch.float32 else 1e-12
    for got, want in zip((logits, value, *grads), (*exact[:2], *exact[2]), strict=True):
        want = torch.zeros_like(got).double() if want is None else want
        bound = tolerance * (1e-3 + want.abs().max().item())
        assert (got.double() - want).abs().max().item() <= bound


def _data(model_inputs, outputs, batch, dtype, device, probes=1):
    x = torch.randn(batch, model_inputs, dtype=dtype, device=device)
    return x, torch.randn(probes, batch, outputs, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(device, way, dtype, activation):
    x, probes = _data(5, 3, 11, dtype, device, probes=2)
    _check(_mlp([5, 19, 8, 3], activation), x, probes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_without_bias(device, way, dtype):
    x, probes = _data(12, 7, 9, dtype, device)
    _check(Square([12, 33, 7]), x, probes)


@pytest.mark.parametrize(
    "widths",
    [[4, 2], [1, 1, 1], [43, 20, 20, 2], [7, 8, 300, 17], [3, 40, 40, 40, 40, 5], [270, 16, 2]],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 8, 13])
def test_every_shape(device, way, widths, batch):
    x, probes = _data(widths[0], widths[-1], batch, torch.float32, device)
    _check(_mlp(widths), x, probes)


@pytest.mark.parametrize("penalty", ["orthogonal", "jacobian"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("parts", ["both", "logits", "penalty"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_penalties_reductions_and_missing_gradients(
    device, way, penalty, reduction, parts, activation
):
    x, probes = _data(6, 4, 10, torch.float64, device, probes=3)
    _check(_mlp([6, 9, 4], activation), x, probes, penalty, reduction, parts)


def test_large_row_blocks(device):
    """From 2080 samples on a block has 16 rows."""
    x, probes = _data(3, 2, 2083, torch.float32, device)
    _check(_mlp([3, 9, 2]), x, probes)


def test_strided_input_and_zero_rows(device, way):
    x = torch.randn(9, 24, device=device)[:, 3:11]
    x[4] = 0
    _check(_mlp([8, 10, 3]), x, torch.randn(1, 9, 3, device=device))


def test_nan_stays_in_its_row(device, way):
    model = _mlp([5, 20, 3]).to(device)
    x, probes = _data(5, 3, 9, torch.float32, device)
    x[2, 1] = float("nan")
    logits, value = normalign.grokalign(
        model, x, probe_vectors=probes, reduction="none", implementation="native",
        check_finite=False,
    )  # fmt: skip
    bad = torch.isnan(value) | torch.isnan(logits).any(1)
    assert torch.nonzero(bad).flatten().tolist() == [2]


def test_frozen_parameters_and_no_grad(device, way):
    model = _mlp([5, 12, 3]).to(device)
    x, probes = _data(5, 3, 9, torch.float32, device)
    with torch.no_grad():
        logits, value = normalign.grokalign(model, x, probe_vectors=probes)
    assert not logits.requires_grad
    assert not value.requires_grad
    torch.testing.assert_close(logits, model(x))
    model[0].weight.requires_grad_(False)
    logits, value = normalign.grokalign(model, x, probe_vectors=probes, implementation="native")
    (logits.sum() + value).backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


def test_backward_twice_gives_the_same(device, way):
    model = _mlp([5, 12, 3], "gelu").to(device)
    x, probes = _data(5, 3, 9, torch.float32, device)
    logits, value = normalign.grokalign(model, x, probe_vectors=probes, implementation="native")
    total = logits.sum() + value
    first = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(total, list(model.parameters()))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)  # every sum has one order


def test_a_changed_weight_is_an_error(device, way):
    model = _mlp([5, 12, 3]).to(device)
    x, probes = _data(5, 3, 9, torch.float32, device)
    logits, value = normalign.grokalign(model, x, probe_vectors=probes, implementation="native")
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logits.sum() + value).backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("activation", ["relu", "leaky"])
@pytest.mark.parametrize("bias", [True, False])
def test_joint(device, dtype, reduction, activation, bias):
    for widths, probes in (([6, 9, 8, 4], 1), ([6, 9, 4], 3), ([5, 3], 2)):
        x, v = _data(widths[0], widths[-1], 10, dtype, device, probes)
        _check(_mlp(widths, activation, bias), x, v, "joint", reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("parts", ["both", "logits", "penalty"])
def test_joint_of_squares(device, dtype, reduction, parts):
    """Modular addition's network: the offset follows from homogeneity."""
    x, probes = _data(6, 4, 10, dtype, device, probes=2)
    _check(Square([6, 9, 4]), x, probes, "joint", reduction, parts)
    model = Square([6, 9, 4]).to(x)
    model.first = nn.Linear(6, 9).to(x)
    with pytest.raises(RuntimeError, match="linear pieces, or squares without bias"):
        normalign.grokalign(
            model, x, penalty="joint", probe_vectors=probes, implementation="native"
        )


@pytest.mark.parametrize("parts", ["logits", "penalty"])
def test_joint_with_a_missing_gradient(device, parts):
    x, probes = _data(6, 4, 10, torch.float64, device)
    _check(_mlp([6, 9, 7, 4]), x, probes, "joint", parts=parts)


def test_joint_of_a_dead_net_and_of_tiny_weights(device):
    """J = 0 has gradient 0 under the root; small weights still have one."""
    x, probes = _data(5, 3, 9, torch.float32, device)
    model = _mlp([5, 12, 3]).to(device)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    _, value = normalign.grokalign(
        model, x, penalty="joint", probe_vectors=probes, implementation="native"
    )
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    tiny = _mlp([5, 12, 12, 3], bias=False).to(device)
    with torch.no_grad():
        for p in tiny.parameters():
            p.mul_(1e-8)
    _, value = normalign.grokalign(
        tiny, x, penalty="joint", probe_vectors=probes, implementation="native"
    )
    value.backward()
    assert tiny[0].weight.grad.abs().max().item() > 0


def test_joint_of_a_curved_net_takes_the_general_path(device):
    model = _mlp([5, 12, 3], "gelu").to(device)
    x, probes = _data(5, 3, 9, torch.float32, device)
    with pytest.raises(RuntimeError, match="joint penalty's offset needs linear pieces"):
        normalign.grokalign(
            model, x, penalty="joint", probe_vectors=probes, implementation="native"
        )
    normalign.grokalign(model, x, penalty="joint", probe_vectors=probes)[1].backward()


def _launches(model, x, probes):
    before = _load._emu.launches()
    logits, value = normalign.grokalign(model, x, probe_vectors=probes, implementation="native")
    (logits.sum() + value).backward()
    return _load._emu.launches() - before


def test_launches_of_a_step():
    if "emulated" not in gpu_devices():
        pytest.skip("launches are counted by the emulated kernels")
    with on_gpu("emulated"):
        x, probes = _data(5, 3, 9, torch.float32, "cpu")
        # transpose, forward to tangent; backward chain, all weight gradients
        assert _launches(_mlp([5, 12, 12, 12, 3]), x, probes) == 4
        # One linear layer has no chain.
        assert _launches(_mlp([5, 3]), x, probes) == 3


def test_launches_of_a_wide_step(monkeypatch):
    if "emulated" not in gpu_devices():
        pytest.skip("launches are counted by the emulated kernels")
    monkeypatch.setattr(_stack_cuda, "_Small", _stack_cuda.WideStep)
    with on_gpu("emulated"):
        x, probes = _data(5, 3, 9, torch.float32, "cpu")
        # Each hidden layer: forward, adjoint, tangent, backward; and the projection.
        assert _launches(_mlp([5, 12, 12, 12, 3]), x, probes) == 4 * 3 + 1


def test_what_fits():
    """The models of the benches are small stacks; very wide ones are not."""
    if "emulated" not in gpu_devices():
        pytest.skip("asks the emulated kernels")
    small = {
        "parity": [43, 200, 200, 2],
        "mnist": [784, 200, 200, 200, 10],
        "modular addition": [122, 256, 61],
    }
    wide = {"wide": [512, 1024, 1024, 1024, 100], "xor": [40000, 2048, 1]}
    for widths in (*small.values(), *wide.values()):
        n = len(widths) - 1
        stack = _load._emu.Stack(widths, [1] * n, [0.0] * n, [0.0] * n)
        for size in (4, 8):
            assert stack.fits(size, 0) == (widths in small.values())


@pytest.fixture
def small_gpu():
    """The emulated machine with the shared memory of an sm_86."""
    if "emulated" not in gpu_devices():
        pytest.skip("asks the emulated kernels")
    _load._emu.set_shared_limit(99 << 10)
    yield
    _load._emu.set_shared_limit(227 << 10)


def test_a_gpu_with_less_shared_memory(small_gpu):
    """What does not fit there takes the other way; what is launched fits."""
    wide, narrow = _mlp([900, 8, 2]), _mlp([43, 20, 2])
    with on_gpu("emulated"):
        for model, dtype, launches in ((wide, torch.float64, 5), (narrow, torch.float64, 4)):
            x, probes = _data(model[0].in_features, 2, 3, dtype, "cpu")
            assert _launches(model.to(dtype), x, probes) == launches
    stack = _load._emu.Stack([900, 8], [1], [0.0], [0.0])
    assert stack.fits(4, 0)
    assert not stack.fits(8, 0)
    assert _load._emu.attack_fits(5000, 2, 8, 8, 4, 0)
    assert not _load._emu.attack_fits(8000, 2, 8, 8, 4, 0)


def test_bad_calls_are_refused():
    if "emulated" not in gpu_devices():
        pytest.skip("asks the emulated kernels")
    emu = _load._emu
    with pytest.raises(ValueError, match="widths must have one entry more"):
        emu.Stack([3, 3], [1, 1], [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        emu.Stack([3, 0], [1], [0.0], [0.0])
    with pytest.raises(ValueError, match="unknown activation"):
        emu.Stack([3, 3], [77], [0.0], [0.0])
    stack = emu.Stack([3, 3], [1], [0.0], [0.0])
    with pytest.raises(ValueError, match="weight has no memory"):
        stack.forward_f32(1, 1, [0], [0], 0, 3, 0, 0, True, True, 0, 0, (0,) * 7, 0, 0)
    with pytest.raises(ValueError, match="too large"):
        emu.Stack([4000, 4000], [1], [0.0], [0.0]).workspace_f32(1, 1, 0)
