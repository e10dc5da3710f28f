"""The RFAM iteration against its definition in float64, on inputs that break float32 elsewhere."""

import numpy as np
import pytest
import torch

from normalign import _rfam_fit


@pytest.fixture(autouse=True)
def _one_thread():
    """Small arrays: more threads only wait for each other."""
    torch.set_num_threads(1)


def _definition(x, y, *, alpha=0.0, reg=1e-3, bandwidth=10.0, n_iter=5):
    """RFAM as the paper writes it, in numpy float64: M explicit, no centring, no factors."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n, d = x.shape
    m = (1 - alpha) * (np.atleast_2d(np.cov(x.T)) if n > 1 else 0) + alpha * np.eye(d)
    m = m * (d / np.trace(m)) if np.trace(m) > 0 else m
    delta = x[:, None, :] - x[None, :, :]
    for _ in range(n_iter):
        distance = np.sqrt(np.maximum(np.einsum("ijd,de,ije->ij", delta, m, delta), 0))
        k = np.exp(-distance / bandwidth)
        a = np.linalg.solve(k + reg * np.eye(n), y)
        w = np.divide(k, distance, out=np.zeros_like(k), where=distance > 0)
        g = -np.einsum("ij,jc,ijd->icd", w, a, delta) @ m / bandwidth
        used = m
        m = np.einsum("icd,ice->de", g, g)
        m = m * (d / np.trace(m)) if np.trace(m) > 0 else used
    return used, a


def _relative(m, exact):
    return np.linalg.norm(m.double().numpy() - exact) / max(np.linalg.norm(exact), 1e-300)


def _table(n, d, c, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    scores = x @ torch.randn(d, c, generator=g) + (x[:, :1] * x[:, -1:])
    y = torch.nn.functional.one_hot(scores.argmax(1), c).float()
    return x, y


def _constant_column(x):
    x = x.clone()
    x[:, 1] = 3.25
    return x


def _large_column(x):
    x = x.clone()
    x[:, 2] *= 1e6
    return x


CASES = {
    "plain": (lambda x: x, {}),
    "rfm start": (lambda x: x, {"alpha": 1.0}),
    "between": (lambda x: x, {"alpha": 0.3, "reg": 0.1}),
    "offset 1e4": (lambda x: x + 1e4, {}),
    "constant column": (_constant_column, {}),
    "constant column, rfm": (_constant_column, {"alpha": 1.0}),
    "all columns constant": (lambda x: torch.full_like(x, 2.5), {}),
    "all columns constant, rfm": (lambda x: torch.full_like(x, 2.5), {"alpha": 1.0}),
    "one column times 1e6": (_large_column, {}),
    "one column times 1e6, rfm": (_large_column, {"alpha": 1.0}),
    "fewer points than columns": (lambda x: x[:5], {}),
    "fewer points than columns, rfm": (lambda x: x[:5], {"alpha": 1.0}),
    "one point": (lambda x: x[:1], {"alpha": 1.0}),
    "one point, no features": (lambda x: x[:1], {}),
    "every row twice": (lambda x: torch.cat([x[:75], x[:75]]), {}),
    "short bandwidth": (lambda x: x, {"bandwidth": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_feature_matrix_within_1e5_of_float64(case, implementation, dtype, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    x, y = _table(150, 6, 3)
    change, settings = CASES[case]
    x = change(x).to(dtype)
    y = y[: len(x)]
    exact, coef = _definition(x, y, **settings)
    machine = _rfam_fit.fit(x, y.to(dtype), **settings).machine
    bound = 1e-9 if dtype is torch.float64 else 1e-5
    assert _relative(machine.feature_matrix, exact) < bound
    scale = np.abs(coef).max()
    assert np.abs(machine.dual_coef.double().numpy() - coef).max() < 100 * bound * scale


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_one_class_has_an_answer(alpha):
    x, _ = _table(80, 4, 2)
    y = torch.ones(80, 1)
    exact, _ = _definition(x, y, alpha=alpha)
    machine = _rfam_fit.fit(x, y, alpha=alpha).machine
    assert _relative(machine.feature_matrix, exact) < 1e-5


def test_machine_against_autograd():
    x, y = _table(40, 5, 3)
    x, y = x.double(), y.double()
    machine = _rfam_fit.fit(x, y, n_iter=2).machine
    queries = torch.randn(7, 5, dtype=torch.float64)
    m = machine.feature_matrix

    def f(q):
        delta = q - x
        return torch.exp(-((delta @ m) * delta).sum(1).sqrt() / 10) @ machine.dual_coef

    exact = torch.stack([torch.autograd.functional.jacobian(f, q) for q in queries])
    torch.testing.assert_close(machine.decision(queries), torch.stack([f(q) for q in queries]))
    torch.testing.assert_close(machine.jacobian(queries), exact)
    v = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(
        machine.input_gradient(queries, v), torch.einsum("mc,mcd->md", v, exact)
    )
    torch.testing.assert_close(machine.agop(queries), torch.einsum("mcd,mce->de", exact, exact) / 7)


def test_gradient_at_a_training_point_is_finite():
    x, y = _table(30, 4, 2)
    machine = _rfam_fit.fit(x, y).machine
    assert torch.isfinite(machine.jacobian(x)).all()


def test_best_iteration_is_kept():
    x, y = _table(60, 4, 2)
    scores = iter([0.5, 0.9, 0.9, 0.1, 0.2])
    seen = []

    def evaluate(decision):
        seen.append(decision)
        return next(scores)

    result = _rfam_fit.fit(x, y, evaluate=evaluate, x_val=x[:7])
    assert result.best_iter == 1  # the first of two equals
    torch.testing.assert_close(result.machine.decision(x[:7]), seen[1])
    assert [h["score"] for h in result.history] == [0.5, 0.9, 0.9, 0.1, 0.2]
    assert result.history[-1]["change"] is None  # nobody would read the last update


def test_sample_weights_equal_duplicated_rows():
    x, y = _table(30, 4, 2)
    x, y = x.double(), y.double()
    counts = torch.arange(30) % 3 + 1
    weighted = _rfam_fit.fit(x, y, sample_weight=counts.double(), alpha=0.5, reg=0.1).machine
    repeated = _rfam_fit.fit(
        x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0), alpha=0.5, reg=0.1
    ).machine
    torch.testing.assert_close(weighted.feature_matrix, repeated.feature_matrix)
    torch.testing.assert_close(weighted.decision(x + 1), repeated.decision(x + 1))


@pytest.mark.parametrize("n", [30, 300])
def test_sample_weights_where_float32_will_not_do(n):
    x, y = _table(n, 4, 2)
    weight = torch.arange(n) % 3 + 1.0
    fits = [
        _rfam_fit.fit(x.to(t), y.to(t), sample_weight=weight.to(t), alpha=1.0, bandwidth=0.05)
        for t in (torch.float32, torch.float64)
    ]
    single, double = (fit.machine for fit in fits)
    assert single.points.dtype is torch.float64  # coordinates beyond float32's range
    # The targets and points are the same numbers: only the centre is rounded to float32.
    error = single.feature_matrix - double.feature_matrix
    assert error.norm() < 1e-5 * double.feature_matrix.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_below_the_range_of_float32(dtype):
    # Two points 15 bandwidths apart: the kernel between them is e^-112, and all gradients point
    # from one to the other.
    x = torch.tensor([[0.0, 1.0, 2.0], [9.0, 13.0, 2.0]], dtype=dtype)
    y = torch.eye(2, dtype=dtype)
    machine = _rfam_fit.fit(x, y, alpha=1.0, bandwidth=1.0, kernel="gaussian", n_iter=2).machine
    along = (x[1] - x[0]).double()
    expected = 3.0 * torch.outer(along, along) / along.square().sum()
    torch.testing.assert_close(machine.feature_matrix, expected, rtol=1e-6, atol=1e-6)


def test_duplicates_without_ridge_warn_once():
    x, y = _table(20, 3, 2)
    x, y = x.repeat(2, 1), y.repeat(2, 1)
    with pytest.warns(RuntimeWarning, match="was added to its diagonal") as record:
        result = _rfam_fit.fit(x, y, reg=0.0, n_iter=1)
    assert len(record) == 1
    assert result.machine.jitter > 0
    assert result.history[0]["jitter"] == result.machine.jitter


def test_nan_is_refused():
    x, y = _table(10, 3, 2)
    x[3, 1] = float("nan")
    with pytest.raises(ValueError, match="X must be finite"):
        _rfam_fit.fit(x, y)
