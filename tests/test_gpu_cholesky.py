"""The batched Cholesky solver, emulated here and on the GPU where there is one."""

import math

import pytest
import torch

from normalign import _gpu, _rfam_cuda, reference
from normalign.testing import gpu_devices, on_gpu

# One, a pair's and a panel's borders, several panels, and more rows than a tile of 256 has.
ORDERS = (1, 2, 31, 32, 33, 97, 513)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _systems(orders, device):
    """Laplace kernel matrices of points in the plane, with NaN wherever nothing is to be read."""
    n = max(orders)
    k = torch.full((len(orders), n, n), float("nan"), dtype=torch.float64, device=device)
    for b, order in enumerate(orders):
        u = torch.randn(order, 2, dtype=torch.float64, device=device)
        full = reference.laplace_gram(u, u, None, 2.0)
        k[b, :order, :order] = full
    return k, torch.tensor(orders, dtype=torch.int32, device=device)


def _exact(k, y, ridge):
    identity = torch.eye(len(k), dtype=torch.float64, device=k.device)
    lower = k.tril()
    return torch.linalg.solve(lower + lower.tril(-1).T + ridge * identity, y)


def _solve(k, y, ridge, orders, ladder=(0.0,)):
    """Right-hand sides (n, c) of each system, padded; the solutions, the factors and jitters."""
    c, n = y[0].shape[1], k.shape[1]
    rows = k.new_full((len(k), c, n), float("nan"))
    for b, right in enumerate(y):
        rows[b, :, : len(right)] = right.T
    factor, before = k.clone(), rows.clone()
    coef, jitter = _rfam_cuda.cholesky_solve(factor, rows, ridge, ladder, orders)
    assert torch.equal(rows.isnan(), before.isnan())
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)
    for b, right in enumerate(y):
        assert not coef[b, len(right) :].any()
    return [coef[b, : len(right)] for b, right in enumerate(y)], factor, jitter


@pytest.mark.parametrize("c", [1, 3, 17])
def test_systems_of_many_orders(device, c):
    orders = ORDERS if c == 3 else ORDERS[:-1]
    k, sizes = _systems(orders, device)
    ridge = torch.linspace(0.01, 0.1, len(orders), dtype=torch.float64, device=device)
    y = [torch.randn(n, c, dtype=torch.float64, device=device) for n in orders]
    got, factor, jitter = _solve(k, y, ridge, sizes)
    eps = torch.finfo(torch.float64).eps
    assert not jitter.any()
    for b, n in enumerate(orders):
        matrix = k[b, :n, :n]
        want = _exact(matrix, y[b], ridge[b])
        # Backward stable: the condition number is at most n / ridge.
        bound = 4 * eps * n / ridge[b].item() * want.abs().max().item()
        assert (got[b] - want).abs().max().item() <= bound
        lower = factor[b, :n, :n].tril()
        full = matrix + ridge[b] * torch.eye(n, dtype=torch.float64, device=device)
        assert (lower @ lower.T - full).abs().max().item() <= 2 * eps * max(8, n)
        assert torch.equal(factor[b, :n, :n].triu(1), matrix.triu(1))
        # What lies beyond is neither read nor written.
        assert torch.isnan(factor[b, n:]).all()
        assert torch.isnan(factor[b, :, n:]).all()


def test_failures_in_the_middle_of_a_batch(device):
    """A copy of a point, a negative pivot, NaN: each climbs as far as it has to, or to NaN."""
    n = 70
    k, _ = _systems([n] * 5, device)
    k[1, 40], k[1, :, 40] = k[1, 11], k[1, :, 11]  # an exact copy
    k[1, 40, 40] = 1.0
    k[2, 33, 33] = -1.0
    k[3, 66, 5] = k[3, 5, 66] = float("nan")
    y = [torch.randn(n, 2, dtype=torch.float64, device=device) for _ in range(5)]
    none = torch.zeros(5, dtype=torch.float64, device=device)
    for ladder in ((0.0,), (0.0, 1e-13, 1e-9, 0.5)):
        got, _, jitter = _solve(k, y, none, None, ladder)
        # 1e-13 is above the rounding of a pivot, a few eps, and not lost in the diagonal of ones.
        want = [0.0, math.nan if len(ladder) == 1 else 1e-13, math.nan, math.nan, 0.0]
        assert jitter.tolist() == pytest.approx(want, abs=0.0, nan_ok=True)
        for b in range(5):
            if math.isnan(want[b]):
                assert torch.isnan(got[b]).all()
                continue
            exact = _exact(k[b], y[b], want[b])
            system = k[b] + want[b] * torch.eye(n, dtype=torch.float64, device=device)
            bound = 4 * torch.finfo(torch.float64).eps * torch.linalg.cond(system).item()
            assert (got[b] - exact).abs().max().item() <= bound * exact.abs().max().item()
    _, _, jitter = _solve(k, y, none + 0.1, None)
    assert jitter[1] == 0
    _, _, jitter = _solve(k, y, none, None, (0.0, 3.0))
    assert jitter[2] == 3.0


def test_one_system_is_the_same_in_any_batch(device):
    """A system's bits depend neither on its neighbours nor on the padding."""
    k, sizes = _systems([40, 90], device)
    y = [torch.randn(n, 3, dtype=torch.float64, device=device) for n in (40, 90)]
    ridge = torch.full((2,), 1e-3, dtype=torch.float64, device=device)
    got, *_ = _solve(k, y, ridge, sizes)
    alone, *_ = _solve(k[:1, :40, :40].contiguous(), y[:1], ridge[:1], None)
    assert torch.equal(got[0], alone[0])


def test_empty_systems_and_batches(device):
    k, sizes = _systems([5, 40], device)
    ridge = torch.full((2,), 0.1, dtype=k.dtype, device=device)
    sizes.zero_()
    untouched, y = k.clone(), k.new_full((2, 3, 40), float("nan"))
    coef, jitter = _rfam_cuda.cholesky_solve(k, y, ridge, (0.0,), sizes)
    assert coef.shape == (2, 40, 3)
    assert not coef.any()
    assert not jitter.any()
    torch.testing.assert_close(k, untouched, equal_nan=True)
    coef, jitter = _rfam_cuda.cholesky_solve(k[:0], y[:0], ridge[:0])
    assert coef.shape == (0, 40, 3)
    assert jitter.shape == (0,)


def test_the_binding_refuses_what_it_cannot_read(device):
    module = _gpu.module(device)
    with pytest.raises(ValueError, match="k has no memory"):
        module.cholesky_solve_f64(1, 4, 1, 0, 0, [0.0], 0, 1, 1, 1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="c must be at least 0"):
        module.cholesky_solve_f64(1, 4, -1, 0, 1, [0.0], 1, 1, 1, 1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="ladder must have at most 12 steps, got 13"):
        module.cholesky_solve_f64(1, 4, 1, 0, 1, [0.0] * 13, 1, 1, 1, 1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="ranks has no memory"):
        module.semidefinite_factor_f64(1, 4, 0, 1, 1, 1, 0, 0)
