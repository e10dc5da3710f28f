"""Factors of semi-definite matrices, emulated here and on the GPU where there is one.

What is compared is always ``C C^T``: a factor itself is one of many. Bounds are in the largest
entry of R. Rounding in R's n columns, and what is left where pivots have become rounding, are each
about ``n eps`` of it; eigh's own answer errs as much.
"""

import numpy as np
import pytest
import torch

from normalign import _rfam_cuda
from normalign.testing import gpu_devices, on_gpu

EPS = np.finfo(np.float64).eps
# One, a panel's borders, more rows than threads, and more than two tiles of them.
ORDERS = (1, 2, 31, 32, 33, 97, 257, 513)


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def _gram(g):
    return g.T @ g


def _rotated(rng, values):
    q = np.linalg.qr(rng.standard_normal((len(values),) * 2))[0]
    r = (q * values) @ q.T
    return (r + r.T) / 2


def _by_eigh(r):
    """The factor from an eigendecomposition, without directions below rounding."""
    values, vectors = np.linalg.eigh(r)
    kept = values > len(r) * EPS * max(values.max(), 0.0)
    return vectors[:, kept] * np.sqrt(values[kept])


def _factors(matrices, device):
    """Factors of matrices of different orders, padded with 0, and the ranks."""
    n = max(len(m) for m in matrices)
    r = torch.zeros(len(matrices), n, n, dtype=torch.float64)
    for b, m in enumerate(matrices):
        r[b, : len(m), : len(m)] = torch.from_numpy(m)
    ranks = torch.tensor([len(m) for m in matrices], dtype=torch.int32, device=device)
    return _rfam_cuda.semidefinite_factor(r.to(device), ranks).cpu().numpy(), ranks.tolist()


def _check(matrices, device, ranks=None, bound=4.0):
    """``C C^T = R``, columns beyond the rank and the order 0; the ranks, if given."""
    found, got = _factors(matrices, device)
    for b, (r, c) in enumerate(zip(matrices, found, strict=True)):
        n, rank = len(r), got[b]
        assert 0 < rank <= n
        assert not c[n:].any()
        assert not c[:, rank:].any()
        assert (c[:, :rank] != 0).any(axis=0).all()
        size = np.abs(r).max()
        product = c[:n, :n] @ c[:n, :n].T
        assert np.abs(product - r).max() <= bound * n * EPS * size
        by_eigh = _by_eigh(r)
        assert np.abs(product - by_eigh @ by_eigh.T).max() <= (bound + 4) * n * EPS * size
        if ranks is not None:
            assert rank == ranks[b]


def test_definite_matrices_of_many_orders(device, rng):
    matrices = [_gram(rng.standard_normal((n + 20, n))) for n in ORDERS]
    _check(matrices, device, ORDERS)
    found, _ = _factors(matrices, device)
    for r, c in zip(matrices, found, strict=True):
        want = np.linalg.cholesky(r)
        np.testing.assert_allclose(c[: len(r), : len(r)], want, rtol=0, atol=1e-9 * want.max())


def test_fewer_gradients_than_features(device, rng):
    """A batch of every rank, whatever the order; 300 rows are more than a block has threads."""
    shapes = [(1, 5), (3, 4), (7, 33), (20, 64), (31, 32), (40, 97), (12, 300), (30, 513)]
    matrices = [_gram(rng.standard_normal(shape)) for shape in shapes]
    _check(matrices, device, [m for m, _ in shapes])


def test_copies_and_constant_columns(device, rng):
    """Columns twice, columns of 0, columns that are sums of others."""
    g = rng.standard_normal((50, 12))
    twice = np.concatenate((g, g), axis=1)
    constant = g.copy()
    constant[:, [0, 5, 11]] = 0.0
    sums = np.concatenate((g, g @ rng.standard_normal((12, 4))), axis=1)
    one = np.outer(rng.standard_normal(50), rng.standard_normal(40))
    matrices = [_gram(m) for m in (twice, constant, sums, one)]
    _check(matrices, device, [12, 9, 12, 1])
    c = _factors(matrices[1:2], device)[0][0]
    assert not c[[0, 5, 11]].any()


@pytest.mark.parametrize("decades", [3, 8, 12, 15, 20, 40])
def test_eigenvalues_in_clusters(device, rng, decades):
    """Groups of equal eigenvalues down to rounding and far below it.

    With pivots of about eps, Cholesky in the given order would leave errors of sqrt(eps).
    """
    matrices = []
    for n in (6, 35, 70):
        values = np.repeat(np.logspace(0, -decades, 6)[: min(n, 6)], -(-n // 6))[:n]
        matrices += [_rotated(rng, values), 1e-8 * _rotated(rng, values[::-1].copy())]
        scale = np.logspace(0, -decades / 2, n)
        matrices.append(_rotated(rng, np.ones(n) + values) * np.outer(scale, scale))
    _check(matrices, device)


def test_small_entries_count(device):
    """[[delta, e], [e, 1]] with delta = e^2 at rounding: e must not be lost with its pivot."""
    for delta in (1e-14, 1e-16, 1e-17, 0.0):
        e = np.sqrt(delta)
        _check([np.array([[delta, e], [e, 1.0]]), np.array([[1.0, e], [e, delta]])], device)


def test_scale_does_not_matter(device, rng):
    """From near the least to near the greatest number, and where roots are just above 0."""
    r = _gram(rng.standard_normal((5, 9)))
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        _check([r * scale, _gram(rng.standard_normal((20, 9))) * scale], device, [5, 9])


def test_slightly_negative(device, rng):
    """Eigenvalues and entries of the diagonal below 0 by rounding are taken for 0."""
    values = np.array([1.0, 0.5, 1e-3, -1e-16, -3e-16, -1e-17])
    negative = np.zeros((4, 4))
    negative[0, 0], negative[3, 3] = 1.0, -1e-17
    _check([_rotated(rng, values), negative], device, [3, 1])


def test_no_gradients(device, rng):
    """Where R is 0 the features stay: the identity, of the order that they have, and that rank."""
    zeros = np.zeros((3, 3))
    full = _gram(rng.standard_normal((20, 5)))
    found, ranks = _factors([zeros, full, -1e-30 * np.eye(4)], device)
    assert ranks == [3, 5, 4]
    np.testing.assert_array_equal(found[0], np.diag([1.0, 1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_array_equal(found[2], np.diag([1.0, 1.0, 1.0, 1.0, 0.0]))
    # A problem without features has nothing to factor; nor has an empty batch.
    found, ranks = _factors([np.zeros((0, 0)), full], device)
    assert ranks == [0, 5]
    assert not found[0].any()
    assert _factors([np.zeros((0, 0))], device)[0].shape == (1, 0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (40, 40), (40, 3), (3, 40)])
def test_nan_and_infinity_stay_visible(device, rng, bad, place):
    """The whole factor is NaN then, its neighbours in the batch are as they would be alone."""
    good = _gram(rng.standard_normal((60, 50)))
    broken = good.copy()
    broken[place] = broken[place[::-1]] = bad
    found, ranks = _factors([good, broken, good], device)
    assert ranks == [50, 50, 50]
    assert np.isnan(found[1]).all()
    alone, _ = _factors([good], device)
    np.testing.assert_array_equal(found[0], alone[0])
    np.testing.assert_array_equal(found[2], alone[0])


def test_the_same_bits_whatever_the_batch_and_the_padding(device, rng):
    deficient = _gram(rng.standard_normal((9, 20)))
    # Ties between pivots everywhere, also across warps.
    ties = np.kron(np.ones((2, 2)), np.eye(40))
    together, _ = _factors([ties, deficient, ties], device)
    again, _ = _factors([ties, deficient, ties], device)
    np.testing.assert_array_equal(together, again)
    for b, r in enumerate((ties, deficient)):
        alone, _ = _factors([r], device)
        np.testing.assert_array_equal(together[b, : len(r), : len(r)], alone[0])
    # The first of equal pivots comes first.
    np.testing.assert_array_equal(together[0][:40, :40], np.eye(40))


def test_what_lies_beyond_is_not_read(device, rng):
    r = torch.full((1, 40, 40), float("nan"), dtype=torch.float64, device=device)
    inner = _gram(rng.standard_normal((5, 12)))
    r[0, :12, :12] = torch.from_numpy(inner)
    ranks = torch.tensor([12], dtype=torch.int32, device=device)
    c = _rfam_cuda.semidefinite_factor(r, ranks)[0].cpu().numpy()
    assert ranks.item() == 5
    assert np.abs(c[:12] @ c[:12].T - inner).max() <= 4 * 12 * EPS * np.abs(inner).max()
    assert not c[12:].any()
