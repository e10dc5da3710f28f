"""The batched Cholesky solver, emulated here and on the GPU where there is one."""

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


def _solve(k, y, ridge, orders):
    """Right-hand sides (n, c) of each system, padded; the solutions likewise, and the rest."""
    c, n = y[0].shape[1], k.shape[1]
    rows = k.new_full((len(k), c, n), float("nan"))
    for b, right in enumerate(y):
        rows[b, :, : len(right)] = right.T
    factor = k.clone()
    info = _rfam_cuda.cholesky_solve(factor, rows, ridge, orders)
    return [rows[b, :, : len(right)].T for b, right in enumerate(y)], factor, info, rows


@pytest.mark.parametrize("c", [1, 3, 17])
def test_systems_of_many_orders(device, c):
    orders = ORDERS if c == 3 else ORDERS[:-1]
    k, sizes = _systems(orders, device)
    ridge = torch.linspace(0.01, 0.1, len(orders), dtype=torch.float64, device=device)
    y = [torch.randn(n, c, dtype=torch.float64, device=device) for n in orders]
    got, factor, info, rows = _solve(k, y, ridge, sizes)
    eps = torch.finfo(torch.float64).eps
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
        assert info[b, 0] == 0
        torch.testing.assert_close(info[b, 1], lower.diagonal().square().min())
        assert info[b, 2] == full.diagonal().max()
        # What lies beyond is neither read nor written.
        assert torch.isnan(factor[b, n:]).all()
        assert torch.isnan(factor[b, :, n:]).all()
        assert torch.isnan(rows[b, :, n:]).all()


def test_failures_in_the_middle_of_a_batch(device):
    """Copies of a point with no ridge fail where the copy stands; neighbours are untouched."""
    n = 70
    k, _ = _systems([n] * 5, device)
    k[1, 40], k[1, :, 40] = k[1, 11], k[1, :, 11]  # an exact copy
    k[1, 40, 40] = 1.0
    k[2, 33, 33] = -1.0
    k[3, 66, 5] = float("nan")
    y = [torch.randn(n, 2, dtype=torch.float64, device=device) for _ in range(5)]
    got, _, info, _ = _solve(k, y, None, None)
    assert info[2, 0] == 34
    assert info[3, 0] == 67
    # Rounding decides whether the pivot of a copy is a little above 0: both are seen.
    noise = torch.finfo(torch.float64).eps * n
    assert info[1, 0] == 41 or info[1, 1] < noise
    for b in (0, 4):
        assert info[b, 0] == 0
        want = _exact(k[b], y[b], 0.0)
        condition = torch.linalg.cond(k[b]).item()
        error = (got[b] - want).abs().max().item()
        assert error <= 4 * torch.finfo(torch.float64).eps * condition * want.abs().max().item()
    ridge = torch.full((5,), 0.1, dtype=torch.float64, device=device)
    _, _, info, _ = _solve(k, y, ridge, None)
    assert info[1, 0] == 0
    assert info[1, 1] > 0.05


def test_one_system_is_the_same_in_any_batch(device):
    """A system's bits depend neither on its neighbours nor on the padding."""
    k, sizes = _systems([40, 90], device)
    y = [torch.randn(n, 3, dtype=torch.float64, device=device) for n in (40, 90)]
    ridge = torch.full((2,), 1e-3, dtype=torch.float64, device=device)
    got, *_ = _solve(k, y, ridge, sizes)
    alone, *_ = _solve(k[:1, :40, :40].contiguous(), y[:1], ridge[:1], None)
    assert torch.equal(got[0], alone[0])


def test_no_right_hand_side_and_empty_batches(device):
    k, sizes = _systems([5, 40], device)
    want = torch.linalg.cholesky(k[1] + 0.1 * torch.eye(40, dtype=k.dtype, device=device))
    none = k.new_empty(2, 0, 40)
    ridge = torch.full((2,), 0.1, dtype=k.dtype, device=device)
    info = _rfam_cuda.cholesky_solve(k, none, ridge, sizes)
    assert not info[:, 0].any()
    torch.testing.assert_close(k[1].tril(), want)
    sizes.zero_()
    untouched = k.clone()
    info = _rfam_cuda.cholesky_solve(k, none, ridge, sizes)
    assert torch.equal(
        info, torch.tensor([0.0, 1.0, 0.0], dtype=k.dtype, device=device).expand(2, 3)
    )
    torch.testing.assert_close(k, untouched, equal_nan=True)
    assert _rfam_cuda.cholesky_solve(k[:0], none[:0]).shape == (0, 3)


def test_the_binding_refuses_what_it_cannot_read(device):
    module = _gpu.module(device)
    with pytest.raises(ValueError, match="k has no memory"):
        module.cholesky_solve_f64(1, 4, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="c must be at least 0"):
        module.cholesky_solve_f64(1, 4, -1, 0, 0, 1, 1, 1, 0, 0)
