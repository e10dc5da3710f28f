"""RFAM's kernels on many problems in one launch, emulated here and on a GPU where there is one."""

import pytest
import torch

from normalign import _load, _rfam_cuda, reference
from normalign.testing import DTYPES, assert_as_accurate, gpu_devices, on_gpu

SIZES_M = (70, 1, 64, 0, 33)
SIZES_N = (66, 5, 64, 40, 130)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _padded(sizes, *shape, dtype, device):
    """Random arrays with NaN where a problem has no points."""
    t = torch.randn(len(sizes), max(sizes), *shape, dtype=dtype, device=device)
    for b, size in enumerate(sizes):
        t[b, size:] = float("nan")
    return t


def _sizes(sizes, device):
    return torch.tensor(sizes, dtype=torch.int32, device=device)


def _launches(call, device):
    before = _load._emu.launches() if device.type == "cpu" else None
    result = call()
    assert before is None or _load._emu.launches() - before == 1
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [False, True])
def test_gram(device, dtype, weights):
    u = _padded(SIZES_N, 3, dtype=dtype, device=device)
    z = _padded(SIZES_M, 3, dtype=dtype, device=device)
    f = reference.gradient_weights if weights else reference.laplace_gram
    own_n, own_m = _sizes(SIZES_N, device), _sizes(SIZES_M, device)
    for other, rows, columns in ((u, own_n, own_n), (z, own_n, own_m)):
        k = _launches(
            lambda o=other, r=rows, c=columns: _rfam_cuda.gram(
                u, o, 2.0, 1.0, weights=weights, own_m=r, own_n=c
            ),
            device,
        )
        for b, (m, n) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            x, y = u[b, :m], u[b, :n] if other is u else z[b, :n]
            exact = f(x.double(), y.double(), None, 2.0)
            assert_as_accurate(k[b, :m, :n], f(x, y, None, 2.0), exact, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [1, 3, 70])
def test_matvec_and_jacobian(device, dtype, c):
    """Each problem against the definition; rows without a point give 0."""
    width = 3
    u = _padded(SIZES_M, width, dtype=dtype, device=device)
    z = _padded(SIZES_N, width, dtype=dtype, device=device)
    coef = _padded(SIZES_N, c, dtype=dtype, device=device)
    own = {"own_m": _sizes(SIZES_M, device), "own_n": _sizes(SIZES_N, device)}
    u[0, 2] = z[0, 2]  # a training point
    outputs = _launches(lambda: _rfam_cuda.matvec(u, z, coef, 2.0, 1.0, **own), device)
    slopes = _launches(lambda: _rfam_cuda.jacobian(u, z, coef, 2.0, 1.0, **own), device)
    for b, (m, n) in enumerate(zip(SIZES_M, SIZES_N, strict=True)):
        parts = u[b, :m], z[b, :n], coef[b, :n]
        wide = [t.double() for t in parts]
        for got, f in ((outputs, reference.laplace_matvec), (slopes, reference.jacobian)):
            assert not got[b, m:].any()
            # Up to 130 terms of several units each, in another order.
            scale = 4 * float(n) ** 0.5
            assert_as_accurate(got[b, :m], f(*parts, None, 2.0), f(*wide, None, 2.0), scale=scale)


def test_single_jacobian_in_parts(device):
    """Without a batch, and with few rows, whose sums several blocks share."""
    u, z, coef = (torch.randn(n, k, device=device) for n, k in ((3, 20), (300, 20), (300, 4)))
    wide = [t.double() for t in (u, z, coef)]
    for exponent in (1.0, 2.0, 0.7):
        assert_as_accurate(
            _rfam_cuda.jacobian(u, z, coef, 2.0, exponent),
            reference.jacobian(u, z, coef, None, 2.0, exponent),
            reference.jacobian(*wide, None, 2.0, exponent),
            scale=300**0.5,
        )


def test_project(device):
    x = torch.randn(2, 50, 7, dtype=torch.float64, device=device)
    x[0, 41] = x[0, 3]
    factor = torch.randn(3, 7, 5, dtype=torch.float64, device=device)
    table = _sizes([0, 1, 0], device)
    u = _launches(lambda: _rfam_cuda.project_batch(x, factor, table), device)
    torch.testing.assert_close(u, x[table.long()] @ factor, rtol=1e-13, atol=1e-13)
    assert torch.equal(u[:, 41][[0, 2]], u[:, 3][[0, 2]])


def test_empty(device):
    x = torch.zeros(2, 4, 3, dtype=torch.float64, device=device)
    table = _sizes([0, 1], device)
    none = x[:, :, :0].transpose(1, 2)
    assert _rfam_cuda.project_batch(x, none.new_zeros(2, 3, 0), table).shape == (2, 4, 0)
    coef = x.new_zeros(2, 4, 0)
    assert _rfam_cuda.matvec(x, x, coef, 1.0, 1.0).shape == (2, 4, 0)
    assert _rfam_cuda.jacobian(x[:, :0], x, coef, 1.0, 1.0).shape == (2, 0, 0, 3)
