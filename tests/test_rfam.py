"""RFAMClassifier and RFAMRegressor."""

from __future__ import annotations

import pathlib
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from normalign import RFAMClassifier, RFAMRegressor
from normalign._rfam_machine import Machine
from normalign._rfam_memory import fit_bytes, parse_bytes, rows_that_fit
from normalign._rfam_solve import System

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import rfam_oracle as oracle
from rfam_oracle import blobs

# scikit-learn asks 1e-7 of these, whatever the dtype of the computation.
FLOAT32_REASON = "compares to 1e-7, which is the rounding of float32; float64 passes"
FLOAT32_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": FLOAT32_REASON,
    "check_methods_subset_invariance": FLOAT32_REASON,
}


@pytest.mark.parametrize("cls", [RFAMClassifier, RFAMRegressor])
def test_check_estimator(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # data with constant columns, skipped array-API checks
        check_estimator(cls(), on_skip=None)


@pytest.mark.parametrize("cls", [RFAMClassifier, RFAMRegressor])
def test_check_estimator_float32(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(cls(dtype="float32"), on_skip=None, expected_failed_checks=FLOAT32_FAILURES)


# --- values

CASES = {
    "ordinary": lambda g: g.normal(size=(60, 4)),
    "constant column": lambda g: np.c_[g.normal(size=(60, 3)), np.full(60, 7.0)],
    "offset 1e4": lambda g: np.round(g.normal(size=(60, 4)) * 1024) / 1024 + 1e4,
    "fewer rows than columns": lambda g: g.normal(size=(12, 30)),
    "two equal columns": lambda g: g.normal(size=(60, 3))[:, [0, 1, 2, 2]],
    "every row twice": lambda g: np.repeat(g.normal(size=(30, 4)), 2, axis=0),
    "one feature small": lambda g: g.normal(size=(60, 4)) * [1, 1, 1, 1e-3],
}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_feature_matrix_is_that_of_float64(case, alpha):
    generator = np.random.default_rng(3)
    X = CASES[case](generator).astype(np.float32)
    y = (X - X.mean(0))[:, 0] > 0.1 * generator.normal(size=len(X))
    model = RFAMClassifier(alpha=alpha, reg=1e-2, dtype="float32").fit(X, y)
    M, coef = oracle.fit(
        X.astype(np.float64) - X.astype(np.float64).mean(0), np.eye(2)[y.astype(int)],
        alpha, 1e-2, 10.0, 5,
    )  # fmt: skip
    error = np.linalg.norm(model.feature_matrix_ - M) / np.linalg.norm(M)
    assert error < 1e-5  # the bar that the design sets for float32
    np.testing.assert_allclose(model.feature_importances_, np.diag(M), atol=1e-5 * len(M))
    # Coefficients carry the condition of K + reg I, at most n / reg = 6e3 roundings of 6e-8.
    np.testing.assert_allclose(model.dual_coef_, coef, atol=4e-4 * np.abs(coef).max())


def test_feature_times_a_million():
    X, y = blobs(d=4)
    X = (X * [1, 1, 1, 1e6]).astype(np.float32)
    for alpha in (0.0, 1.0):
        model = RFAMClassifier(alpha=alpha, bandwidth=1e6, dtype="float32").fit(X, y)
        M, _ = oracle.fit(X.astype(np.float64), np.eye(3)[y], alpha, 1e-3, 1e6, 5)
        assert np.linalg.norm(model.feature_matrix_ - M) < 1e-5 * np.linalg.norm(M)
        assert np.isfinite(model.predict_proba(X)).all()


def test_offset_changes_nothing():
    """C14: values on a grid that float32 still resolves at 1e4."""
    X, y = blobs(200, 4)
    X = (np.round(X * 1024) / 1024).astype(np.float32)
    train, test = slice(0, 150), slice(150, 200)
    plain = RFAMClassifier(dtype="float32").fit(X[train], y[train])
    moved = RFAMClassifier(dtype="float32").fit(X[train] + 1e4, y[train])
    a, b = plain.decision_function(X[test]), moved.decision_function(X[test] + 1e4)
    # The centres differ by their rounding at 1e4, half of 1/1024; distances don't see it.
    np.testing.assert_allclose(a, b, atol=2e-4)
    assert plain.score(X[test], y[test]) == moved.score(X[test] + 1e4, y[test])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_at_a_training_point(dtype):
    """C15."""
    X, y = blobs(40)
    model = RFAMClassifier(dtype=dtype, n_iter=2).fit(X, y)
    x = torch.from_numpy(X.astype(dtype))
    jacobian = model.machine_.jacobian(x).double().numpy()
    exact = oracle.jacobians(X, X, model.dual_coef_.astype(np.float64), model.feature_matrix_, 10.0)
    assert np.isfinite(jacobian).all()
    np.testing.assert_allclose(jacobian, exact, atol=2e-4 * np.abs(exact).max())


def test_duplicates_without_reg():
    """C16."""
    X, y = blobs(40)
    X, y = np.repeat(X, 2, axis=0), np.repeat(y, 2)
    with pytest.warns(RuntimeWarning, match="was added to its diagonal") as caught:
        model = RFAMClassifier(reg=0.0, n_iter=1, dtype="float32").fit(X, y)
    assert len(caught) == 1
    assert model.jitter_ > 0
    assert model.history_[0]["jitter"] == model.jitter_
    assert f"{model.jitter_:.3g}" in str(caught[0].message)
    assert model.score(X, y) > 0.95


def test_prediction_in_chunks(monkeypatch):
    """C17."""
    X, y = blobs(90)
    model = RFAMClassifier(dtype="float32").fit(X[:60], y[:60])
    whole = model._outputs(X)
    seen = []
    outputs = Machine._outputs

    def spy(machine, x):
        seen.append(len(x))
        return outputs(machine, x)

    monkeypatch.setattr(Machine, "_outputs", spy)
    for chunk in (1, 7, len(X) + 1):
        seen.clear()
        # Sums may run in another order: one rounding of sum |a_i| K_i, about 50 here.
        np.testing.assert_allclose(model._outputs(X, chunk), whole, atol=1e-4)
        assert max(seen) <= chunk


def test_string_labels_and_a_missing_class():
    """C18."""
    X, y = blobs(90)
    names = np.array(["pear", "apple", "fig"])[y]
    model = RFAMClassifier().fit(X, names)
    assert model.classes_.tolist() == ["apple", "fig", "pear"]
    assert set(model.predict(X)) <= set(names)
    fewer = RFAMClassifier().fit(X[names != "fig"], names[names != "fig"])
    assert fewer.classes_.tolist() == ["apple", "pear"]
    assert fewer.predict_proba(X).shape == (90, 2)
    assert fewer.score(X, names) < 1.0


@pytest.mark.parametrize(
    "kind", [lambda y: y.astype(bool), lambda y: 2 * y - 1, lambda y: np.array(["n", "y"])[y]]
)
def test_binary_labels(kind):
    X, y = blobs(80, classes=2)
    labels = kind(y)
    model = RFAMClassifier().fit(X, labels)
    assert model.predict(X).dtype == labels.dtype
    assert model.score(X, labels) > 0.9
    scores = model.decision_function(X)
    assert scores.shape == (80,)
    np.testing.assert_array_equal(model.classes_[(scores > 0).astype(int)], model.predict(X))


def test_one_class():
    X, _ = blobs(20)
    model = RFAMClassifier().fit(X, np.full(20, "only"))
    assert set(model.predict(X)) == {"only"}
    np.testing.assert_array_equal(model.predict_proba(X), np.ones((20, 1)))


@pytest.mark.parametrize("n", [1, 2])
def test_few_rows(n):
    model = RFAMClassifier().fit(np.arange(n * 3.0).reshape(n, 3), np.arange(n))
    assert model.predict(np.zeros((1, 3))).shape == (1,)
    regressor = RFAMRegressor().fit(np.ones((1, 3)), [5.0])
    np.testing.assert_allclose(regressor.predict(np.zeros((2, 3))), 5.0)


def test_all_columns_constant():
    X, y = np.ones((20, 3)), np.arange(20) % 4 == 0
    for alpha in (0.0, 1.0):
        model = RFAMClassifier(alpha=alpha, dtype="float32").fit(X, y)
        assert not model.predict(X).any()
        # K is all ones: every output is n_class / (n + reg).
        np.testing.assert_allclose(model.predict_proba(X[:1]), [[0.75, 0.25]], atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(bad):
    X, y = blobs(30)
    X[3, 2] = bad
    for model in (RFAMClassifier(), RFAMRegressor()):
        with pytest.raises(ValueError, match="contains"):
            model.fit(X, y)
    fitted = RFAMClassifier().fit(X[10:], y[10:])
    with pytest.raises(ValueError, match="contains"):
        fitted.predict(X)
    with pytest.raises(ValueError, match="contains"):
        RFAMRegressor().fit(X[10:], np.r_[bad, y[11:]])


# --- scikit-learn


def test_data_frame_columns():
    """C19."""
    pandas = pytest.importorskip("pandas")
    X, y = blobs(50, 3, classes=2)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    model = RFAMClassifier().fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="order"):
        model.predict(frame[["c", "b", "a"]])
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"a": "z"}))


def test_pipeline_and_clone():
    """C20."""
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), RFAMClassifier(bandwidth=5.0, alpha=0.3))
    assert pipeline.fit(X, y).score(X, y) > 0.95
    assert clone(pipeline)[-1].get_params() == pipeline[-1].get_params()


@pytest.mark.parametrize("n_iter", [1, 5])
def test_weights_are_copies(n_iter):
    """C21."""
    X, y = blobs(50)
    weight = np.random.default_rng(1).integers(0, 4, 50)
    rows = np.repeat(np.arange(50), weight)
    for cls in (RFAMClassifier, RFAMRegressor):
        weighted = cls(n_iter=n_iter, dtype="float64").fit(X, y, sample_weight=weight)
        copied = cls(n_iter=n_iter, dtype="float64").fit(X[rows], y[rows])
        assert len(weighted.dual_coef_) == (weight > 0).sum()
        np.testing.assert_allclose(
            weighted.feature_matrix_, copied.feature_matrix_, rtol=1e-6, atol=1e-8
        )
        np.testing.assert_allclose(weighted._outputs(X), copied._outputs(X), atol=1e-7)


def test_weights_refused():
    X, y = blobs(20)
    with pytest.raises(ValueError, match="non-zero"):
        RFAMRegressor().fit(X, y, sample_weight=np.zeros(20))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        RFAMClassifier().fit(X, y, sample_weight=-np.ones(20))


def test_pickle_loads_without_a_gpu():
    """C22: a model that was set to a GPU predicts on the CPU where there is none."""
    X, y = blobs(40)
    model = RFAMClassifier().fit(X, y)
    model.device = "cuda"
    again = pickle.loads(pickle.dumps(model))
    assert all(
        value.device.type == "cpu"
        for value in vars(again.machine_).values()
        if isinstance(value, torch.Tensor)
    )
    if not torch.cuda.is_available():
        np.testing.assert_array_equal(again.predict(X), RFAMClassifier().fit(X, y).predict(X))


def test_threads_are_obeyed_and_restored(monkeypatch):
    """C23."""
    X, y = blobs(40)
    torch.set_num_threads(1)
    seen = set()

    def watch(owner, name):
        kernel = getattr(owner, name)

        def spy(*args, **settings):
            seen.add((name, torch.get_num_threads()))
            return kernel(*args, **settings)

        monkeypatch.setattr(owner, name, spy)

    watch(Machine, "_outputs")
    watch(System, "solve")
    RFAMClassifier(n_jobs=2, n_iter=2).fit(X, y).predict(X)
    assert seen == {("_outputs", 2), ("solve", 2)}
    assert torch.get_num_threads() == 1
    seen.clear()
    RFAMClassifier(n_iter=2).fit(X, y).predict(X)
    assert seen == {("_outputs", 1), ("solve", 1)}
    with pytest.raises(ValueError, match="n_jobs must be"):
        RFAMClassifier(n_jobs=0).fit(X, y)


# --- validation


def test_validation_chooses_the_iteration():
    X, y = blobs(150, seed=4)
    model = RFAMClassifier().fit(X[:100], y[:100], X_val=X[100:], y_val=y[100:])
    scores = [entry["score"] for entry in model.history_]
    assert len(scores) == 5
    assert scores[model.best_iter_] == max(scores)
    assert model.score(X[100:], y[100:]) == pytest.approx(max(scores))
    assert set(model.history_[0]) == {"iteration", "score", "change", "jitter", "seconds"}


def test_validation_fraction():
    X, y = blobs(100)
    model = RFAMClassifier(validation_fraction=0.25, random_state=1).fit(X, y)
    assert len(model.dual_coef_) == 75
    again = RFAMClassifier(validation_fraction=0.25, random_state=1).fit(X, y)
    np.testing.assert_array_equal(model.dual_coef_, again.dual_coef_)
    rare = np.r_[9, y[1:]]  # a class of one row can't be in both parts
    assert RFAMClassifier(validation_fraction=0.25).fit(X, rare).n_features_in_ == 5
    assert RFAMRegressor(validation_fraction=0.5).fit(X, X[:, 0]).history_[0]["score"] > 0


def test_validation_labels_never_seen_count_as_wrong():
    X, y = blobs(60)
    model = RFAMClassifier().fit(X, y, X_val=X[:10], y_val=np.full(10, 77))
    assert [entry["score"] for entry in model.history_] == [0.0] * 5


def test_validation_refused():
    X, y = blobs(30)
    with pytest.raises(ValueError, match="must be given together, got no y_val"):
        RFAMClassifier().fit(X, y, X_val=X)
    with pytest.raises(ValueError, match="inconsistent numbers"):
        RFAMClassifier().fit(X, y, X_val=X, y_val=y[:5])
    with pytest.raises(ValueError, match="expecting 5 features"):
        RFAMClassifier().fit(X, y, X_val=X[:, :3], y_val=y)
    with pytest.raises(ValueError, match="y_val must have 2 targets"):
        RFAMRegressor().fit(X, X[:, :2], X_val=X, y_val=y)


def test_tol_stops_early():
    X, y = blobs(60)
    assert len(RFAMClassifier(tol=10.0).fit(X, y).history_) == 1
    assert len(RFAMClassifier(tol=1e-12).fit(X, y).history_) == 5


def test_sampled_agop_is_reproducible():
    X, y = blobs(60)
    a, b = (RFAMClassifier(agop_samples=20, random_state=3).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(a.feature_matrix_, b.feature_matrix_)
    full = RFAMClassifier().fit(X, y)
    assert not np.allclose(a.feature_matrix_, full.feature_matrix_, rtol=1e-3)


# --- regression


def test_several_targets():
    X, _ = blobs(80)
    Y = np.c_[X[:, 0] ** 2, X[:, 1] + 100.0]
    model = RFAMRegressor(bandwidth=3.0, dtype="float64").fit(X, Y)
    M, coef = oracle.fit(X, Y - Y.mean(0), 0.0, 1e-3, 3.0, 5)
    np.testing.assert_allclose(model.feature_matrix_, M, atol=1e-8)
    expected = oracle.predict(X[:7], X, coef, M, 3.0) + Y.mean(0)
    np.testing.assert_allclose(model.predict(X[:7]), expected, atol=1e-7)
    assert model.predict(X).shape == (80, 2)
    assert RFAMRegressor().fit(X, Y[:, 0]).predict(X).shape == (80,)


# --- probabilities, parameters, memory


def test_probabilities_are_the_closest_on_the_simplex():
    from normalign.rfam import simplex_projection

    generator = np.random.default_rng(0)
    scores = generator.normal(size=(200, 4)) * 2
    p = simplex_projection(scores)
    np.testing.assert_allclose(p.sum(axis=1), 1.0)
    assert (p >= 0).all()
    np.testing.assert_array_equal(p.argmax(axis=1), scores.argmax(axis=1))
    others = generator.dirichlet(np.ones(4), size=2000)
    closest = np.square(scores[:, None] - others).sum(axis=2).min(axis=1)
    assert (np.square(scores - p).sum(axis=1) <= closest).all()


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("alpha", 1.5, "alpha must lie between"),
        ("reg", -1.0, "reg must be non-negative"),
        ("bandwidth", 0.0, "bandwidth must be positive"),
        ("kernel", "cosine", "kernel must be one of"),
        ("kernel", 2.5, "kernel must be a name or an exponent"),
        ("n_iter", 0, "n_iter must be an integer of at least 1"),
        ("tol", -1.0, "tol must be positive"),
        ("agop_samples", 0, "agop_samples must be an integer"),
        ("validation_fraction", 1.0, "validation_fraction must lie between"),
        ("dtype", "float16", "dtype must be one of"),
        ("memory_limit", "many", "memory_limit must be bytes or text"),
    ],
)
def test_parameters_refused(parameter, value, message):
    X, y = blobs(20)
    with pytest.raises(ValueError, match=message):
        RFAMClassifier(**{parameter: value}).fit(X, y)


@pytest.mark.parametrize(("kernel", "exponent"), [("gaussian", 2.0), (1.5, 1.5), (0.7, 0.7)])
def test_other_kernels(kernel, exponent):
    X, y = blobs(40)
    model = RFAMClassifier(kernel=kernel, bandwidth=3.0, n_iter=1, alpha=1.0, reg=0.1).fit(X, y)
    length = 3.0 * np.sqrt(2.0) if kernel == "gaussian" else 3.0
    K = np.exp(-((oracle.distances(X, X, np.eye(5)) / length) ** exponent))
    coef = np.linalg.solve(K + 0.1 * np.eye(40), np.eye(3)[y])
    np.testing.assert_allclose(model.dual_coef_, coef, atol=1e-9)


def test_memory_is_estimated_before_it_is_taken():
    X, y = blobs(100)
    with pytest.raises(MemoryError, match=r"100 rows in float64 needs about .* rows would fit"):
        RFAMClassifier(memory_limit=50_000).fit(X, y)
    with pytest.raises(MemoryError, match='dtype="float32"'):
        RFAMClassifier(memory_limit="50KB").fit(X, y)
    RFAMClassifier(memory_limit="1MB").fit(X, y)
    rows = rows_that_fit(10**9, 20, 3, 4)
    assert fit_bytes(rows, 20, 3, 4) <= 10**9 < fit_bytes(rows + 1, 20, 3, 4)
    assert [parse_bytes(v) for v in ("8GB", "1.5 K", 7)] == [8 * 10**9, 1500, 7]
    # A table that can't fit anywhere is refused at once, on a view that takes no memory.
    wide = np.broadcast_to(np.float32(0.5), (3_000_000, 1))
    with pytest.raises(MemoryError, match="3,000,000 rows in float32"):
        RFAMRegressor().fit(wide, np.zeros(len(wide), dtype=np.float32))


def test_dtype_follows_the_data():
    X, y = blobs(30)
    assert RFAMClassifier().fit(X, y).dual_coef_.dtype == np.float64
    assert RFAMClassifier().fit(X.astype(np.float32), y).dual_coef_.dtype == np.float32
    model = RFAMClassifier(dtype="float32").fit(X, y)
    assert model.dual_coef_.dtype == np.float32
    assert model.decision_function(X).dtype == np.float32


def test_inputs_are_left_alone():
    X, y = blobs(30)
    before = X.copy()
    X.setflags(write=False)
    state = torch.get_rng_state()
    RFAMClassifier(agop_samples=5).fit(X, y).predict(X)
    np.testing.assert_array_equal(X, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_verbose(capsys):
    X, y = blobs(30)
    RFAMClassifier(verbose=1, n_iter=2).fit(X, y)
    assert capsys.readouterr().out.count("[RFAMClassifier] iteration") == 2
