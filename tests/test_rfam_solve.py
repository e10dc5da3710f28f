"""One iteration of RFAM, stage by stage, against NumPy in float64."""

import pathlib
import sys

import numpy as np
import pytest
import torch

from normalign import _load, _rfam_agop
from normalign._rfam_factor import next_factor
from normalign._rfam_kernels import Factor, Points, Scratch, make_kernel
from normalign._rfam_machine import Machine
from normalign._rfam_solve import System

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import rfam_oracle as oracle

pytestmark = pytest.mark.skipif(_load.cpu_error is not None, reason="needs the native kernels")

# 1 and 2 points, around a vector and a panel of 48, primes, and more than are solved in float64.
SIZES = (1, 2, 31, 32, 33, 47, 48, 49, 97, 151, 263, 331)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _problem(n, d=5, r=4, c=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, d, generator=g), torch.randn(n, c, generator=g)
    factor = torch.randn(d, r, generator=g, dtype=torch.float64)
    return x + 3.0, y, torch.full((d,), 2.5), factor


def _kernel(u, v, bandwidth, exponent=1.0):
    distance = np.linalg.norm(u[:, None, :] - v[None, :, :], axis=2)
    return np.exp(-((distance / bandwidth) ** exponent))


def _exact(x, y, mean, factor, reg, bandwidth, exponent=1.0, weight=None):
    u = (x.double().numpy() - mean.double().numpy()) @ factor.numpy()
    ridge = reg / (np.ones(len(u)) if weight is None else weight.double().numpy())
    system = _kernel(u, u, bandwidth, exponent) + np.diag(ridge)
    return u, np.linalg.solve(system, y.double().numpy())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_solution(n, dtype, threads, weighted):
    x, y, mean, factor = _problem(n)
    weight = (torch.arange(n) % 3 + 1).to(dtype) if weighted else None
    x, y, mean = x.to(dtype), y.to(dtype), mean.to(dtype)
    system = System(x, y, mean, make_kernel("laplace", 4.0), 1e-2, weight, threads)
    found = system.solve(factor)
    u, coef = _exact(x, y, mean, factor, 1e-2, 4.0, weight=weight)
    # Corrected float32: the rounding of the points, 1e-7, times a condition of some tens.
    bound = 1e-5 if dtype is torch.float32 else 1e-11
    assert found.coef.dtype is dtype
    assert found.jitter == 0
    assert np.abs(found.points.u.double().numpy() - u).max() < bound * np.abs(u).max()
    assert np.abs(found.coef.double().numpy() - coef).max() < bound * np.abs(coef).max()


@pytest.mark.parametrize("n", [49, 331])
@pytest.mark.parametrize(
    ("kernel", "length", "exponent"), [("gaussian", 2.0 * 2**0.5, 2.0), (1.5, 2.0, 1.5)]
)
def test_solution_of_other_kernels(n, kernel, length, exponent):
    x, y, mean, factor = _problem(n)
    found = System(x, y, mean, make_kernel(kernel, 2.0), 0.1, None, 1).solve(factor)
    _, coef = _exact(x, y, mean, factor, 0.1, length, exponent)
    assert np.abs(found.coef.numpy() - coef).max() < 2e-5 * np.abs(coef).max()


@pytest.mark.parametrize("n", [97, 331])
def test_uncorrected_errors_stay_below_their_estimate(n):
    x, y, mean, factor = _problem(n)
    system = System(x, y, mean, make_kernel("laplace", 4.0), 1e-2, None, 1)
    found = system.solve(factor, refine=False)
    u, coef = _exact(x, y, mean, factor, 1e-2, 4.0)
    pivots = np.diag(np.linalg.cholesky(_kernel(u, u, 4.0) + 1e-2 * np.eye(n))) ** 2
    estimate = np.finfo(np.float32).eps * n / pivots.min()
    assert np.abs(found.coef.numpy() - coef).max() < estimate / 3 * np.abs(coef).max()


@pytest.mark.parametrize("n", [151, 331, 600])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_correction_leaves(n, threads):
    x, y, mean, factor = _problem(n)
    system = System(x, y, mean, make_kernel("laplace", 10.0), 1e-3, None, threads)
    found = system.solve(factor)
    u = found.points.u.double().numpy()  # as they were rounded
    coef = np.linalg.solve(_kernel(u, u, 10.0) + 1e-3 * np.eye(n), y.double().numpy())
    # The rounding to float32; without a correction it is 2e-5 to 2e-4.
    assert np.abs(found.coef.numpy() - coef).max() < 2e-7 * np.abs(coef).max()


@pytest.mark.parametrize("n", [150, 300])
def test_points_that_nearly_coincide_are_solved_in_float64(n):
    x, y, mean, factor = _problem(n // 2)
    shifted = x + 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    x, y = torch.cat([x, shifted]), torch.cat([y, -y])
    system = System(x, y, mean, make_kernel("laplace", 4.0), 1e-5, None, 1)
    found = system.solve(factor)
    _, coef = _exact(x, y, mean, factor, 1e-5, 4.0)
    assert found.coef.dtype is torch.float64
    # 1e-9 from the preconditioned solution, or float64's own with a condition of 1e7.
    assert np.abs(found.coef.numpy() - coef).max() < 1e-8 * np.abs(coef).max()


def test_scratch_may_be_overwritten_between_solves():
    x, y, mean, factor = _problem(97)
    system = System(x, y, mean, make_kernel("laplace", 4.0), 1e-2, None, 1)
    first = system.solve(factor).coef
    system.scratch.take(1 << 22)
    for part in system.scratch.tensors(torch.float32, 1 << 20):
        part.fill_(torch.nan)
    torch.testing.assert_close(system.solve(factor).coef, first, rtol=0, atol=0)


def test_strided_and_expanded_points():
    x, y, mean, factor = _problem(33)
    kernel = make_kernel("laplace", 4.0)
    whole = System(x, y, mean, kernel, 0.1, None, 1).solve(factor).coef
    wide = torch.full((33, 9), torch.nan)
    wide[:, 2:7] = x
    for view in (wide[:, 2:7], x.T.contiguous().T):
        got = System(view, y, mean, kernel, 0.1, None, 1).solve(factor).coef
        torch.testing.assert_close(got, whole, rtol=0, atol=0)
    same = x[:1].expand(33, 5)
    got = System(same, y, mean, kernel, 0.1, None, 1).solve(factor).coef
    _, coef = _exact(same, y, mean, factor, 0.1, 4.0)
    assert np.abs(got.numpy() - coef).max() < 1e-4 * np.abs(coef).max()


@pytest.mark.parametrize("m", [1, 2, 47, 49, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions(m, dtype):
    x, y, mean, factor = _problem(97)
    queries = torch.randn(m, 5, dtype=dtype) + 3.0
    system = System(x.to(dtype), y.to(dtype), mean.to(dtype), make_kernel("laplace", 4.0), 0.1,
                    None, 1)  # fmt: skip
    found = system.solve(factor)
    machine = Machine(mean.to(dtype), factor, found.points.u, found.coef, 4.0)
    v = (queries.double().numpy() - 2.5) @ factor.numpy()
    u, coef = _exact(x, y, mean, factor, 0.1, 4.0)
    bound = 2e-5 if dtype is torch.float32 else 1e-11
    for threads in (1, 2):
        torch.set_num_threads(threads)
        got = machine.decision(queries).double().numpy()
        assert np.abs(got - _kernel(v, u, 4.0) @ coef).max() < bound * np.abs(coef).sum(0).max()
    # A float64 machine that is asked in float32, and the other way.
    other = torch.float64 if dtype is torch.float32 else torch.float32
    assert machine.decision(queries.to(other)).dtype is other
    np.testing.assert_allclose(machine.decision(queries.to(other)), got, atol=1e-4)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_and_its_least_pivot(n, dtype):
    g = torch.Generator().manual_seed(n)
    a = torch.randn(n, n + 3, generator=g, dtype=torch.float64)
    matrix = a @ a.T / n + 9.0 * torch.eye(n, dtype=torch.float64)
    targets = torch.randn(n, 3, generator=g, dtype=torch.float64)
    exact = np.linalg.solve(matrix.numpy(), targets.numpy())
    for threads in (1, 2):
        factor = Factor.of_matrix(matrix.to(dtype), 0.0, threads)
        bound = 1e-5 if dtype is torch.float32 else 1e-12
        got = factor.solve(targets.to(dtype)).double().numpy()
        assert np.abs(got - exact).max() < bound * np.abs(exact).max()
        # Above 9: what fills the last panel, an identity, is no pivot of the matrix.
        least = np.diag(np.linalg.cholesky(matrix.numpy())).min() ** 2
        assert factor.least_pivot == pytest.approx(least, rel=bound)


@pytest.mark.parametrize(("d", "r"), [(1, 1), (5, 3), (20, 20), (64, 64), (70, 70), (90, 33)])
def test_next_factor(d, r):
    g = torch.Generator().manual_seed(d)
    factor = torch.randn(d, r, generator=g, dtype=torch.float64)
    a = torch.randn(r, r + 2, generator=g, dtype=torch.float64)
    agop = 1e-30 * (a @ a.T)
    before = agop.clone()
    updated, change = next_factor(factor, agop)
    old, new = (factor @ factor.T).numpy(), (factor @ (agop / 1e-30) @ factor.T).numpy()
    new *= d / np.trace(new)
    np.testing.assert_allclose((updated @ updated.T).numpy(), new, atol=1e-12 * np.abs(new).max())
    assert change == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(new), rel=1e-9)
    assert torch.equal(agop, before)


def test_next_factor_of_a_singular_agop():
    factor = torch.eye(6, dtype=torch.float64)
    direction = torch.arange(1.0, 7.0, dtype=torch.float64)
    updated, _ = next_factor(factor, torch.outer(direction, direction))
    assert updated.shape == (6, 1)
    expected = 6 * torch.outer(direction, direction) / direction.square().sum()
    torch.testing.assert_close(updated @ updated.T, expected)
    assert next_factor(factor, torch.zeros(6, 6, dtype=torch.float64)) == (None, 0.0)


@pytest.mark.parametrize("method", _rfam_agop.AGOP_METHODS)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_agop_in_scratch(method, size):
    x, y, _, _ = _problem(97)
    points = Points(x, make_kernel("laplace", 4.0))
    scratch = Scratch()
    for part in scratch.tensors(torch.float32, 1 << 18):
        part.fill_(torch.nan)
    got = _rfam_agop.agop(points, points, size * y, 1, method=method, scratch=scratch)
    u = x.double().numpy()
    g = oracle.jacobians(u, u, y.double().numpy(), np.eye(5), 4.0)
    exact = np.einsum("ikt,iks->ts", g, g)
    assert np.abs(got.numpy() / size**2 - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_gram_form_where_squares_cancel(weighted, threads):
    # Narrow clusters, like signs within each: large terms of neighbours cancel in every gradient.
    g = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(4, 6, generator=g), torch.arange(150) % 4
    x = centres[labels] + 1e-3 * torch.randn(150, 6, generator=g)
    coef = torch.nn.functional.one_hot(labels, 4) + 0.01 * torch.randn(150, 4, generator=g)
    weight = torch.arange(150) % 3 + 1.0 if weighted else None
    points = Points(x, make_kernel("laplace", 4.0))
    got = _rfam_agop.agop(points, points, coef, threads, weight, "gram").numpy()
    u = x.double().numpy()
    gradients = oracle.jacobians(u, u, coef.double().numpy(), np.eye(6), 4.0)
    counts = np.ones(150) if weight is None else weight.numpy()
    exact = np.einsum("i,ikt,iks->ts", counts, gradients, gradients)
    assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()
