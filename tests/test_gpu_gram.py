"""Kernel matrices of more than 32 coordinates on the GPU: products; differences for near pairs."""

import pytest
import torch

from normalign import _rfam_cuda, reference
from normalign.testing import DTYPES, gpu_devices, on_gpu


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _bound(width, dtype, exponent=1.0):
    """The bound of csrc/cuda/distance_tile.cuh, and the rounding of root and exponential."""
    eps = torch.finfo(dtype).eps
    return 6 * exponent * (16 + width / 16) * eps / 2 + 4 * eps


def _error(u, z, length, exponent=1.0):
    got = _rfam_cuda.gram(u, z, length, exponent)
    exact = reference.laplace_gram(u.double(), z.double(), None, length, exponent)
    return (got.double() - exact).abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [1.0, 2.0, 0.7])
def test_within_the_stated_bound(device, dtype, exponent):
    for m, n, width in ((1, 1, 33), (3, 70, 47), (65, 63, 64), (70, 5, 97)):
        u = torch.randn(m, width, dtype=dtype, device=device)
        z = torch.randn(n, width, dtype=dtype, device=device)
        z[0] = 0.5 * u[0]  # a quarter of the squares' sum: not near
        bound = _bound(width, dtype, exponent)
        assert _error(u, z, 4.0, exponent).max().item() <= bound
        assert _error(u, u, 4.0, exponent).max().item() <= bound
        weights = _rfam_cuda.gram(u, z, 4.0, exponent, weights=True).double()
        exact = reference.gradient_weights(u.double(), z.double(), None, 4.0, exponent)
        # 32 g in the square; W's logarithm changes by (2 - q) / 2 + q / 2 (D / L)^q of it.
        size = 1 + (u.double().norm(dim=1).max() + z.double().norm(dim=1).max()).item() / 4.0
        assert (weights / exact - 1).abs().max().item() <= 6 * size**2 * bound


@pytest.mark.parametrize("n", [31, 64, 65, 150])
def test_symmetric_with_ones_on_the_diagonal(device, n):
    u = torch.randn(n, 40, device=device)
    k = _rfam_cuda.gram(u, u, 2.0, 1.0)
    assert torch.equal(k, k.T)
    assert torch.equal(k.diagonal(), torch.ones(n, device=device))
    assert torch.equal(k, _rfam_cuda.gram(u, u.clone(), 2.0, 1.0))
    assert torch.equal(k[3:9], _rfam_cuda.gram(u[3:9], u, 2.0, 1.0))
    w = _rfam_cuda.gram(u, u, 2.0, 1.0, weights=True)
    assert not w.diagonal().any()
    assert torch.equal(w, w.T)


def test_equal_points_have_equal_rows(device):
    u = torch.randn(100, 35, device=device)
    u[9] = u[2]
    u[70] = u[2]  # in another tile
    k = _rfam_cuda.gram(u, u, 3.0, 1.0)
    assert torch.equal(k[9], k[2])
    assert torch.equal(k[70], k[2])
    assert k[70, 9].item() == 1.0


@pytest.mark.parametrize("near", [5, 70])
def test_near_pairs_lose_no_digits(device, near):
    """A few pairs are computed again one by one, many by the whole tile."""
    u = torch.randn(70, 40, device=device)
    u[:near] = u[0] + 1e-3 * torch.randn(near, 40, device=device)
    error = _error(u, u, 1.0)[:near, :near].max().item()
    assert error <= 4e-7  # a few roundings of numbers up to 1
    square = (u @ u.T).double()
    product = (square.diagonal()[:, None] + square.diagonal() - 2 * square).clamp(min=0).sqrt()
    exact = torch.cdist(u.double(), u.double(), compute_mode="donot_use_mm_for_euclid_dist")
    worst = ((-product).exp() - (-exact).exp())[:near, :near].abs().max().item()
    assert worst > 100 * error  # what products alone would give


def test_an_offset_costs_nothing(device):
    u = torch.randn(70, 40, device=device) + 1e3
    assert _error(u, u, 8.0).max().item() <= 4e-7


def test_zero_and_nan_points(device):
    u = torch.randn(20, 36, device=device)
    u[4] = 0
    u[7, 30] = float("nan")
    k = _rfam_cuda.gram(u, u, 2.0, 1.0)
    bad = torch.isnan(k)
    assert bad[7].all()
    assert bad.sum().item() == 2 * 20 - 1
    assert k[4, 4].item() == 1.0
    tiny = torch.full((3, 40), 1e-30, device=device)  # squares underflow
    assert torch.equal(_rfam_cuda.gram(tiny, tiny, 1.0, 1.0), torch.ones(3, 3, device=device))
