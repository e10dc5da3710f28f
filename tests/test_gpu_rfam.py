"""The CUDA kernels of RFAM, emulated here and on the GPU where there is one."""

import numpy as np
import pytest
import torch

import normalign
from normalign import _load, _rfam_cuda, _rfam_fit, _rfam_pgd, reference
from normalign.testing import DTYPES, assert_as_accurate, gpu_devices, on_gpu

EXPONENTS = (1.0, 2.0, 0.7)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _points(n, width, dtype, device):
    return torch.randn(n, width, dtype=dtype, device=device)


def _compare(f, definition, *tensors, scale=None):
    """``f`` is as accurate as the definition in the same dtype, both against float64."""
    exact = definition(*(t.double() for t in tensors))
    assert_as_accurate(f(*tensors).cpu(), definition(*tensors).cpu(), exact.cpu(), scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("weights", [False, True])
def test_gram(device, dtype, exponent, weights):
    f = reference.gradient_weights if weights else reference.laplace_gram
    for m, n, width in ((1, 1, 1), (3, 70, 2), (65, 63, 17), (64, 64, 8), (5, 4, 40)):
        u, z = _points(m, width, dtype, device), _points(n, width, dtype, device)
        _compare(
            lambda a, b: _rfam_cuda.gram(a, b, 2.0, exponent, weights=weights),
            lambda a, b: f(a, b, None, 2.0, exponent),
            u,
            z,
            scale=1.0,  # the exponent is rounded before the exponential: K near 0 loses digits
        )


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 150])
def test_symmetric_gram(device, n, weights):
    u = _points(n, 5, torch.float32, device)
    k = _rfam_cuda.gram(u, u, 2.0, 1.0, weights=weights)
    assert torch.equal(k, k.T)
    assert torch.equal(k, _rfam_cuda.gram(u, u.clone(), 2.0, 1.0, weights=weights))
    assert torch.equal(k.diagonal(), torch.full((n,), 0.0 if weights else 1.0, device=device))


def test_offsets_copies_nan_and_no_features(device):
    u = _points(70, 3, torch.float32, device)
    far = (u + 1e4).double() - 1e4  # the points that float32 keeps there
    got = _rfam_cuda.gram(u + 1e4, u + 1e4, 2.0, 1.0).double()
    exact = reference.laplace_gram(far, far, None, 2.0, 1.0)
    assert (got - exact).abs().max().item() < 1e-6
    u[9] = u[2]
    assert _rfam_cuda.gram(u, u, 2.0, 1.0)[9, 2].item() == 1.0
    assert _rfam_cuda.gram(u, u, 2.0, 1.0, weights=True)[9, 2].item() == 0.0
    u[5, 1] = float("nan")
    bad = torch.isnan(_rfam_cuda.gram(u, u, 2.0, 1.0))
    assert bad[5].all()
    assert bad.sum().item() == 2 * 70 - 1
    none = u[:, :0]
    assert torch.equal(_rfam_cuda.gram(none, none, 2.0, 1.0), torch.ones(70, 70, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_matvec(device, dtype, exponent):
    for m, n, width, c in ((1, 1, 1, 1), (3, 200, 2, 3), (66, 70, 20, 70), (130, 5, 8, 4)):
        u, z = _points(m, width, dtype, device), _points(n, width, dtype, device)
        _compare(
            lambda a, b, k: _rfam_cuda.matvec(a, b, k, 2.0, exponent),
            lambda a, b, k: reference.laplace_matvec(a, b, k, None, 2.0, exponent),
            u,
            z,
            _points(n, c, dtype, device),
            scale=float(n) ** 0.5,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_gradient(device, dtype, exponent):
    for m, n, width, c in ((1, 1, 1, 1), (3, 200, 2, 3), (66, 70, 70, 2), (130, 5, 8, 4)):
        u, z = _points(m, width, dtype, device), _points(n, width, dtype, device)
        u[0] = z[0]  # at a training point its own term is 0, never NaN
        _compare(
            lambda a, b, k, v: _rfam_cuda.gradient(a, b, k, v, 2.0, exponent),
            lambda a, b, k, v: reference.input_gradient(a, b, k, v, None, 2.0, exponent),
            u,
            z,
            _points(n, c, dtype, device),
            _points(m, c, dtype, device),
            scale=float(n) ** 0.5,
        )


def test_empty_input(device):
    u, z = torch.zeros(0, 3, device=device), torch.zeros(4, 3, device=device)
    coef = torch.zeros(4, 2, device=device)
    assert _rfam_cuda.gram(u, z, 1.0, 1.0).shape == (0, 4)
    assert _rfam_cuda.matvec(u, z, coef, 1.0, 1.0).shape == (0, 2)
    assert _rfam_cuda.gradient(u, z, coef, coef[:0], 1.0, 1.0).shape == (0, 3)


def _fit_and_attack(x, y, points):
    machine = _rfam_fit.fit(x, y, reg=1e-2, bandwidth=3.0, n_iter=3).machine
    attack = _rfam_pgd.pgd(machine, points, y[:30], eps=0.3, step=0.1, iters=3)
    return machine.feature_matrix, machine.decision(points), attack.x


def test_fit_and_attack_take_the_kernels(device):
    """The whole chain on the GPU's kernels gives what the definition gives."""
    x, points = _points(80, 4, torch.float32, device), _points(30, 4, torch.float32, device)
    y = torch.eye(3, device=device)[torch.randint(3, (80,), device=device)]
    before = _load._emu.launches() if device.type == "cpu" else None
    got = _fit_and_attack(x, y, points)
    if before is not None:
        # Solves and updates of 3 iterations, the decision values, the attack.
        assert _load._emu.launches() - before == 3 + 2 + 1 + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        want = _fit_and_attack(x, y, points)
    for a, b, tolerance in zip(got, want, (1e-6, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_estimator_predicts_the_same(device):
    """`device` of an estimator leads here."""
    if device.type == "cpu":
        pytest.skip("the estimator's device is a real one")
    generator = np.random.default_rng(0)
    x = generator.standard_normal((120, 5)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    on_gpu = normalign.RFAMClassifier(device="cuda", reg=1e-2, random_state=0).fit(x, y)
    on_cpu = normalign.RFAMClassifier(device="cpu", reg=1e-2, random_state=0).fit(x, y)
    np.testing.assert_allclose(on_gpu.feature_matrix_, on_cpu.feature_matrix_, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        on_gpu.decision_function(x), on_cpu.decision_function(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("with_matrix", [False, True])
@pytest.mark.parametrize("name", ["laplace_gram", "laplace_matvec", "input_gradient", "agop"])
def test_public_operators_take_the_kernels(device, name, with_matrix):
    x, z = _points(30, 4, torch.float32, device), _points(40, 4, torch.float32, device)
    coef, cotangent = _points(40, 3, torch.float32, device), _points(30, 3, torch.float32, device)
    root = _points(4, 4, torch.float32, device)
    matrix = root @ root.T if with_matrix else None
    more = {"laplace_gram": (), "input_gradient": (coef, cotangent)}.get(name, (coef,))
    before = _load._emu.launches() if device.type == "cpu" else 0
    got = getattr(normalign, name)(x, z, matrix, 3.0, *more)
    if device.type == "cpu":
        assert _load._emu.launches() == before + 1
    exact = getattr(reference, name)(
        x.double(), z.double(), *(t.double() for t in more),
        None if matrix is None else matrix.double(), 3.0,
    )  # fmt: skip
    # float32 sums of some tens of terms, through a factor of M.
    assert (got.double() - exact).abs().max().item() <= 5e-6 * exact.abs().max().item()


@pytest.mark.parametrize("unit", [2.0**-100, 2.0**-66, 2.0**66, 2.0**100])
@pytest.mark.parametrize("width", [5, 40])
def test_units_of_length_do_not_matter(device, unit, width):
    """Squares of such distances are not float32 numbers; K and products with it don't change."""
    x, coef = _points(30, width, torch.float32, device), _points(30, 2, torch.float32, device)
    call = normalign.laplace_gram, normalign.laplace_matvec
    for f, more in zip(call, ((), (coef,)), strict=True):
        found = f(unit * x, unit * x, None, 4.0 * unit, *more)
        torch.testing.assert_close(found, f(x, x, None, 4.0, *more), rtol=1e-4, atol=1e-5)
    if 1e-30 < unit < 1e30:  # beyond, gradients themselves are not float32 numbers
        found = normalign.input_gradient(unit * x, unit * x, None, 4.0 * unit, coef, coef)
        expected = normalign.input_gradient(x, x, None, 4.0, coef, coef)
        torch.testing.assert_close(unit * found, expected, rtol=1e-4, atol=1e-4)
