"""A sweep on a GPU takes whole tables at once, and finds what one fold after another finds."""

import itertools

import numpy as np
import pytest
from sklearn.datasets import make_classification, make_regression

from normalign import _load, _rfam_batch, _sweep_batch, _sweep_task, sweep
from normalign.testing import gpu_devices, on_gpu

SETTINGS = {"alpha": (0.0, 1.0), "reg": (0.1, 0.01), "folds": 2, "n_iter": 3, "eps": (0.5, 0.1)}

# Published, but for the number of steps: the host machine is slow.
LAST = {"loss": "mse", "steps": 4, "restarts": 1, "best_iterate": False}


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _table(n=60, seed=0):
    return make_classification(n, 4, n_informative=3, n_redundant=0, n_classes=3, random_state=seed)


def _key(row):
    return tuple(str(row[name]) for name in ("table", "fold", "alpha", "reg", "bandwidth"))


def _compare(batch, single, tolerance=1e-6):
    """All columns; times differ."""
    assert not batch.failed
    single = {_key(row): row for row in single.rows}
    assert sorted(single) == sorted(_key(row) for row in batch.rows)
    for row in batch.rows:
        other = single[_key(row)]
        for name, value in row.items():
            if name in ("seconds", "config"):
                continue
            if isinstance(value, str) or isinstance(other[name], str):
                assert value == other[name], name
            else:
                assert value == pytest.approx(other[name], abs=tolerance, nan_ok=True), name


@pytest.mark.parametrize("validation", [None, 0.3])
def test_same_rows_as_fold_after_fold(device, validation, monkeypatch):
    tables = {"a": _table(40, seed=1), "b": _table(33, seed=2)}
    settings = dict(
        SETTINGS, bandwidth=(5.0, 10.0), attack=LAST, validation_fraction=validation,
        device=device.type, progress=False,
    )  # fmt: skip
    calls = []
    batch = _sweep_batch._run_batch
    monkeypatch.setattr(_sweep_batch, "_run_batch", lambda *a: calls.append(a) or batch(*a))
    whole = sweep(tables, **settings)
    assert len(calls) == 4  # a table with a bandwidth
    monkeypatch.setattr(_rfam_batch, "MOST_POINTS", 0)
    monkeypatch.setattr(_sweep_batch, "MOST_POINTS", 0)
    _compare(whole, sweep(tables, **settings))
    assert len(calls) == 4


def test_regression_and_small_batches(device, monkeypatch):
    X, y = make_regression(50, 3, noise=1.0, random_state=0)
    settings = dict(
        SETTINGS, kernel="gaussian", validation_fraction=0.25, device=device.type, progress=False
    )
    monkeypatch.setattr(_sweep_batch, "_BYTES", 3 * 8 * 25 * 25)  # 3 keys at a time
    whole = sweep((X, y), **settings)
    monkeypatch.setattr(_sweep_batch, "MOST_POINTS", 0)
    _compare(whole, sweep((X, y), **settings))


def test_many_features_make_small_batches(device, monkeypatch):
    """More features than points: factors of M are what takes memory."""
    X = np.random.default_rng(0).standard_normal((12, 40))
    calls = []
    run = _sweep_batch._run_batch
    monkeypatch.setattr(_sweep_batch, "_run_batch", lambda t, k: calls.append(len(k)) or run(t, k))
    monkeypatch.setattr(_sweep_batch, "_BYTES", 3 * 8 * 40 * 40)
    settings = dict(SETTINGS, eps=(), device=device.type, progress=False)
    assert not sweep((X, X[:, 0] > 0), **settings).failed
    assert calls == [3, 3, 2]


def test_strong_attack_never_helps(device):
    """Other starts than fold after fold, but the same guarantees."""
    result = sweep(
        _table(40), device=device.type, progress=False, attack={"steps": 8},
        **{**SETTINGS, "eps": (0.1, 0.5, 2.0)},
    )  # fmt: skip
    assert not result.failed
    for row in result.rows:
        robust = [row["test_score"], *(row[f"robust_{eps:g}"] for eps in (0.1, 0.5, 2.0))]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(robust))
        assert 0.0 <= row["zero_gradient_share"] <= 1.0
    assert np.mean([row["robust_2"] for row in result.rows]) < 0.5


def test_a_fold_that_fails_costs_no_other(device, monkeypatch):
    """NaN in the rows that one fold trains on, and in no other's."""
    X, y = _table()
    X[:3] = np.nan
    folds = [(np.arange(0, 40), np.arange(40, 60)), (np.arange(20, 60), np.arange(3, 20))]
    result = sweep(
        (X, y), device=device.type, progress=False, preprocess=None, **{**SETTINGS, "folds": folds}
    )
    assert {row["fold"] for row in result.failed} == {0}
    assert all("NaN" in row["error"] for row in result.failed)
    assert len(result.rows) - len(result.failed) == 4


def test_few_launches(device):
    """Our own launches do not grow with folds, alpha, reg and radii."""
    if device.type != "cpu":
        pytest.skip("the host machine counts launches")
    before = _load._emu.launches()
    sweep(_table(), device="cpu", progress=False, attack=LAST, **SETTINGS)
    # Each of 3 iterations: points, K, solve; two updates: gradients, factor; test points and
    # outputs, twice; the attack; points and Jacobians for the measures.
    assert _load._emu.launches() - before == 3 * 3 + 2 * 2 + 2 * 2 + 1 + 2


def test_where_it_does_not_apply(device):
    common = _sweep_task.Common(2, None, (), None, "float32", None, 0, None, device.type)
    assert _sweep_batch.applies(common, 100)
    assert not _sweep_batch.applies(common, 5000)
    early = _sweep_task.Common(2, 1e-3, (), None, "float32", None, 0, None, device.type)
    assert not _sweep_batch.applies(early, 100)
