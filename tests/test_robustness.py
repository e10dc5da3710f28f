"""pgd_attack, robustness_report and the certified radius."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification

from normalign import (
    RFAMClassifier,
    RFAMRegressor,
    _load,
    certified_radius,
    pgd_attack,
    robustness_report,
)
from normalign._certificate import certified_distance, unit_distance
from normalign._jacobian_measures import jacobian_measures


def rfam(n=150, d=4, classes=3, seed=0, **parameters):
    """A fitted machine with held-out rows."""
    X, y = make_classification(
        n, d, n_informative=d - 1, n_redundant=0, n_classes=classes, random_state=seed,
        class_sep=1.5,
    )  # fmt: skip
    parameters = {"reg": 0.1, "n_iter": 3, "dtype": "float32", **parameters}
    model = RFAMClassifier(**parameters).fit(X[: n - 50], y[: n - 50])
    return model, X[n - 50 :], y[n - 50 :]


class Linear(torch.nn.Module):
    """Two outputs, +-(w.x + b) / 2: the margin is w.x + b, so every answer is known."""

    def __init__(self, d=6, scale=1.0):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(d, dtype=torch.float64))
        self.scale = scale

    def forward(self, x):
        f = x.flatten(1) @ self.w + 0.3
        return torch.stack([-f / 2, f / 2], dim=1) * self.scale


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "margin"])
@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_linear_model_is_turned_exactly_where_it_can_be(norm, dual, loss):
    """A row is robust at eps just when |w.x + b| > eps |w|_dual (Hoelder)."""
    # Beyond the one-hot target the squared error grows with confidence: it needs small outputs.
    model = Linear(scale=0.05)
    x = torch.randn(400, 6, dtype=torch.float64)
    y = (model(x)[:, 1] > 0).long()
    reach = (x @ model.w + 0.3).abs().detach() / model.w.norm(p=dual).detach()
    eps = reach.median().item()
    adversarial = pgd_attack(model, x, y, eps=eps, norm=norm, loss=loss, steps=60)
    turned = (model(adversarial)[:, 1] > 0).long() != y
    sure = (reach - eps).abs() > 1e-3 * eps  # the attack comes this close to the corner
    assert torch.equal(turned[sure], (reach < eps)[sure])
    distance = (adversarial - x).norm(p=math.inf if norm == "linf" else 2, dim=1)
    assert distance.max() <= eps * (1 + 1e-12)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_region_bounds_and_frozen_features(norm):
    model, X, y = rfam()
    eps = np.array([0.5, 0.0, 1.0, 0.2])
    low, high = X.min(0) - 0.1, X.max(0) + 0.1
    for target in (model, _as_torch(model)):
        x = X if target is model else torch.from_numpy(X).float()
        labels = y if target is model else torch.from_numpy(y)
        found = pgd_attack(
            target,
            x,
            labels,
            eps=eps,
            norm=norm,
            bounds=(low, high),
            frozen=[2],
            best_iterate=False,
        )
        moved = np.asarray(found) - X.astype(np.float32)
        assert not moved[:, 1].any()
        assert not moved[:, 2].any()
        assert np.abs(moved[:, 0]).max() > 0.1
        scaled = moved[:, [0, 3]] / eps[[0, 3]]
        size = np.abs(scaled).max(1) if norm == "linf" else np.linalg.norm(scaled, axis=1)
        assert size.max() <= 1 + 1e-5  # roundings of x + eps z in float32
        assert (np.asarray(found) >= low.astype(np.float32)).all()
        assert (np.asarray(found) <= high.astype(np.float32)).all()


def _as_torch(model):
    """The machine written in torch operations, to be attacked through autograd."""
    machine = model.machine_

    def forward(x):
        u = ((x.double() - machine.mean.double()) @ machine.factor).unsqueeze(1)
        distances = (u - machine.points.double()).square().sum(2).clamp(min=1e-300).sqrt()
        kernel = torch.exp(-distances / machine.bandwidth)
        return (kernel @ machine.dual_coef.double()).to(x.dtype)

    return forward


def test_analytic_gradients_attack_as_autograd_does():
    model, X, y = rfam(dtype="float64")
    x, labels = torch.from_numpy(X), torch.from_numpy(y)
    for best_iterate in (True, False):
        for loss in ("mse", "margin", "cross_entropy"):
            settings = {"eps": 0.6, "loss": loss, "best_iterate": best_iterate, "steps": 10}
            ours = pgd_attack(model, x, labels, **settings)
            autograd = pgd_attack(_as_torch(model), x, labels, **settings)
            wrong = [_wrong(model, found, y) for found in (ours, autograd)]
            assert np.array_equal(*wrong)
            if not best_iterate:  # the very same points; a sign can flip where a gradient is 0
                assert ((ours - autograd).abs() < 1e-9).double().mean() > 0.99


def _wrong(model, x, y):
    return model.predict(x.numpy()) != y


def test_published_attack_step_by_step():
    model, X, y = rfam(dtype="float64")
    x = torch.from_numpy(X)
    eps, start = 0.5, None
    target = torch.nn.functional.one_hot(torch.from_numpy(y), 3).double()
    generator = torch.Generator().manual_seed(3)
    start = x + eps * (2 * torch.rand(x.shape, dtype=x.dtype, generator=generator) - 1)
    point = start
    for _ in range(20):
        leaf = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((_as_torch(model)(leaf) - target).square().mean(), leaf)
        point = x + (point + eps / 10 * gradient.sign() - x).clamp(-eps, eps)
    ours = pgd_attack(
        model, x, y, eps=eps, loss="mse", steps=20, step_size=0.1, best_iterate=False,
        random_state=3,
    )  # fmt: skip
    assert ((ours - point).abs() < 1e-9).double().mean() > 0.99
    report = robustness_report(model, X, y, eps=[eps], attack="published", random_state=3)
    accuracy = (model.predict(point.numpy()) == y).mean()
    assert report.accuracy_at_result[1] == pytest.approx(accuracy)
    clean = (model.predict(X) == y).mean()
    assert report.attack_success_published[1] == pytest.approx((clean - accuracy) / clean)


@pytest.mark.parametrize("attack", ["strong", "published", {"norm": "l2", "steps": 5}])
def test_robust_accuracy_never_rises(attack):
    """C24."""
    for seed in range(3):
        model, X, y = rfam(seed=seed, reg=1e-3)
        report = robustness_report(model, X, y, eps=(2, 0.1, 1), attack=attack)
        assert report.eps == [0.0, 0.1, 1.0, 2.0]
        assert all(np.diff(report.robust_accuracy) <= 0)
        assert report.robust_accuracy[0] == report.clean_accuracy == model.score(X, y)
        assert report.attack_success_on_correct[0] == 0
        assert all(np.diff(report.attack_success_on_correct) >= 0)


def test_published_accuracy_may_rise_and_the_report_shows_both():
    """One step too far: at a large eps the last point is back on the right side."""

    def ring(x):  # right for |x| < 1 and |x| > 3
        inside = (x[:, 0].abs() - 2).abs() - 1
        return torch.stack([inside, -inside], dim=1)

    x = torch.zeros(50, 1)
    report = robustness_report(
        ring, x, torch.zeros(50, dtype=torch.long), eps=(2.0, 8.0),
        attack={"random_start": False, "best_iterate": False, "loss": "mse", "restarts": 1},
        measures=False,
    )  # fmt: skip
    assert report.clean_accuracy == 1.0
    assert all(np.diff(report.robust_accuracy) <= 0)


def test_rows_that_are_wrong_already():
    """C25: ten rows, two of them wrong."""
    model = Linear(2)
    model.w.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    x = torch.tensor([[k + 0.2, 0.0] for k in range(10)], dtype=torch.float64)
    y = torch.ones(10, dtype=torch.long)
    y[[0, 9]] = 0
    report = robustness_report(model, x, y, eps=[3.0])
    # Margins k + .5: eps 3 turns the correct rows 1 and 2. It would right row 0, were it asked to.
    assert report.clean_accuracy == pytest.approx(0.8)
    assert report.robust_accuracy[1] == pytest.approx(0.6)
    assert report.attack_success_on_correct[1] == pytest.approx(2 / 8)
    assert report.attack_success_published[1] == pytest.approx((0.8 - 0.6) / 0.8)
    nothing = robustness_report(model, x, 1 - (x[:, 0] > -0.3).long(), eps=[1.0])
    assert nothing.clean_accuracy == 0.0
    assert math.isnan(nothing.attack_success_published[1])
    assert math.isnan(nothing.attack_success_on_correct[1])
    assert "nan" in str(nothing)


def test_zero_gradients_are_reported():
    """A machine far from all its points underflows: the attack fails, and the report says so."""
    model, X, y = rfam()
    near = robustness_report(model, X, y, eps=[0.1], measures=False)
    assert near.zero_gradient_share[1] == 0.0
    far = robustness_report(model, X + 1e5, np.full(50, model.classes_[0]), eps=[0.1])
    assert far.zero_gradient_share[1] == 1.0
    assert far.robust_accuracy == [1.0, 1.0]


def test_models_are_left_as_they_were():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5),
        torch.nn.Linear(8, 3),
    )  # fmt: skip
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.randn(20, 6), torch.randint(3, (20,))
    copy, state = x.clone(), torch.get_rng_state()
    with torch.no_grad():
        first = robustness_report(model, x, y, eps=[0.5], batch_size=7)
    assert [m.training for m in model] == [True, True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(x, copy)
    assert not x.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_inference_mode_enabled()
    assert robustness_report(model, x, y, eps=[0.5], batch_size=7) == first


def test_images():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    x, y = torch.rand(8, 3, 4, 4), torch.randint(3, (8,))
    found = pgd_attack(model, x, y, eps=0.1, bounds=(0.0, 1.0))
    assert found.shape == x.shape
    assert 0.0 <= found.min() <= found.max() <= 1.0
    assert pgd_attack(model, x[:0], y[:0], eps=0.1).shape == (0, 3, 4, 4)


# --- certificate


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reg", [1.0, 1e-2])
def test_nothing_beats_the_certificate(dtype, reg):
    model, X, y = rfam(dtype=dtype, reg=reg, seed=2)
    generator = np.random.default_rng(0)
    right = model.predict(X) == y
    for norm in ("linf", "l2"):
        radius = certified_radius(model, X, y, norm=norm)
        np.testing.assert_array_equal(radius > 0, right)
        for _ in range(100):  # directions at the very edge
            step = generator.normal(size=X.shape)
            if norm == "linf":
                step = np.sign(step)
            size = np.abs(step).max(1) if norm == "linf" else np.linalg.norm(step, axis=1)
            edge = X + step * (radius * (1 - 1e-6) / size)[:, None]
            np.testing.assert_array_equal(model.predict(edge)[right], y[right])
        for row in np.flatnonzero(right)[:15]:
            found = pgd_attack(
                model, X[row : row + 1], y[row : row + 1], eps=radius[row], norm=norm, restarts=3
            )
            inside = X[row] + (found[0] - X[row]) * (1 - 1e-5)
            assert model.predict(inside[None])[0] == y[row]


def test_certificate_where_the_answer_is_known():
    """One positive and one negative centre: along the line between them the turn is found."""
    X = np.array([[0.0], [4.0]])
    model = RFAMClassifier(alpha=1.0, n_iter=1, reg=1e-6, bandwidth=2.0).fit(X, [0, 1])
    x = np.array([[0.0], [1.0], [1.9]])
    radius = certified_radius(model, x, [0, 0, 0])
    true = 2.0 - x[:, 0]  # by symmetry the classes meet in the middle
    assert (radius <= true).all()
    # At x the larger kernel is exp(-r/2), the smaller exp(-(4-r)/2): the term-by-term bound is
    # (4 - 2 r) / 2 = true, so here nothing is given away.
    np.testing.assert_allclose(radius, true, rtol=1e-4)


def test_certificate_in_the_metric_of_m():
    model, X, y = rfam(dtype="float64")
    machine = model.machine_
    x, labels = torch.from_numpy(X), torch.from_numpy(y)
    distance = certified_distance(machine, x, labels)
    step = torch.randn(50, 300, 4, dtype=torch.float64)
    length = (step @ machine.factor).norm(dim=2, keepdim=True)
    points = x[:, None] + step * (distance[:, None, None] * 0.999999 / length)
    found = machine.decision(points.reshape(-1, 4)).argmax(1).reshape(50, 300)
    right = distance > 0
    assert right.sum() > 25
    assert (found[right] == labels[right, None]).all()


def test_unit_distance():
    factor = torch.randn(5, 3, dtype=torch.float64)
    scale = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    z = torch.randn(20000, 5, dtype=torch.float64)
    sphere = (scale * z / z.norm(dim=1, keepdim=True)) @ factor
    corners = (scale * z.sign()) @ factor
    l2, linf = unit_distance(factor, scale, "l2"), unit_distance(factor, scale, "linf")
    assert 0.95 * l2 < sphere.norm(dim=1).max() <= l2 * (1 + 1e-12)
    assert corners.norm(dim=1).max() <= linf * (1 + 1e-12)
    assert unit_distance(factor, torch.zeros(5), "linf") == 0.0


def test_certified_accuracy_is_below_robust_accuracy():
    model, X, y = rfam(reg=1.0)
    report = robustness_report(model, X, y, eps=(0.01, 0.05, 0.2))
    assert report.certified_accuracy[0] == report.clean_accuracy
    assert 0 < report.certified_accuracy[1] <= report.robust_accuracy[1]
    assert all(np.diff(report.certified_accuracy) <= 0)
    frozen = robustness_report(model, X, y, eps=(0.2,), frozen=[0, 1, 2, 3])
    assert frozen.certified_accuracy == frozen.robust_accuracy == [report.clean_accuracy] * 2


def test_certificate_refused():
    model, X, y = rfam(kernel="gaussian")
    with pytest.raises(ValueError, match=r"needs kernel=.laplace., got 'gaussian'"):
        certified_radius(model, X, y)
    assert robustness_report(model, X, y, eps=[0.1]).certified_accuracy is None
    with pytest.raises(ValueError, match="certify needs"):
        robustness_report(model, X, y, eps=[0.1], certify=True)
    with pytest.raises(TypeError, match="needs an RFAMClassifier"):
        certified_radius(Linear(), torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))


# --- measures, output, errors


def test_measures_against_numpy():
    model, X, y = rfam(dtype="float64")
    report = robustness_report(model, X, y, eps=[0.1])
    other = robustness_report(_as_torch(model), torch.from_numpy(X), torch.from_numpy(y), eps=[0.1])
    jacobians = model.machine_.jacobian(torch.from_numpy(X)).numpy()
    ranks, cosines = [], []
    for row, x in zip(jacobians, X, strict=True):
        _, s, v = np.linalg.svd(row)
        ranks.append(s.sum() ** 2 / np.square(s).sum())
        cosines.append(abs(v[0] @ x) / np.linalg.norm(x))
    for found in (report, other):
        assert found.effective_rank == pytest.approx(np.mean(ranks), abs=1e-6)
        assert found.normal_alignment == pytest.approx(np.mean(cosines), abs=1e-6)
    tall = torch.randn(6, 5, 3, dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64)
    s = torch.linalg.svdvals(tall)
    _, _, v = torch.linalg.svd(tall)
    alignments, ranks = jacobian_measures(tall, x)
    torch.testing.assert_close(ranks, s.sum(1) ** 2 / s.square().sum(1))
    torch.testing.assert_close(alignments, torch.cosine_similarity(v[:, 0], x).abs())
    for value in (0.0, torch.nan, torch.inf):
        undefined = torch.full((1, 2, 3), value)
        assert torch.stack(jacobian_measures(undefined, torch.ones(1, 3))).isnan().all()


def test_report_prints_and_plots():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    model, X, y = rfam()
    report = robustness_report(model, X, y, eps=(0.1, 1.0))
    assert len(str(report).splitlines()) == 6
    assert report.to_dict()["settings"]["norm"] == "linf"
    axes = report.plot(label="RFAM")
    assert [line.get_label() for line in axes.lines] == ["RFAM", "RFAM, certified"]
    assert list(axes.lines[0].get_xdata()) == [0.0, 0.1, 1.0]
    matplotlib.pyplot.close(axes.figure)


def test_seeds():
    model, X, y = rfam()
    a, b, c = (
        pgd_attack(model, X, y, eps=0.5, steps=1, best_iterate=False, random_state=seed)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    generator = torch.Generator().manual_seed(1)
    d = pgd_attack(model, X, y, eps=0.5, steps=1, best_iterate=False, random_state=generator)
    np.testing.assert_array_equal(a, d)
    pgd_attack(model, X, y, eps=0.5, steps=1, random_state=None)


def test_string_labels_and_frames():
    pandas = pytest.importorskip("pandas")
    X, y = make_classification(80, 4, random_state=0)
    frame = pandas.DataFrame(X, columns=list("abcd"))
    names = np.array(["no", "yes"])[y]
    model = RFAMClassifier(dtype="float32").fit(frame, names)
    assert isinstance(pgd_attack(model, frame, names, eps=0.1), np.ndarray)
    with pytest.raises(ValueError, match=r"labels of the fitted model, got .*maybe"):
        pgd_attack(model, frame, np.full(80, "maybe"), eps=0.1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"eps": -1.0}, ValueError, "eps must be non-negative"),
        ({"eps": [1.0, 2.0]}, ValueError, r"eps must be a number or have shape \(6,\)"),
        ({"norm": "l1"}, ValueError, "norm must be one of linf, l2"),
        ({"loss": "hinge"}, ValueError, "loss must be one of"),
        ({"steps": 0}, ValueError, "steps must be an integer"),
        ({"step_size": 0.0}, ValueError, "step_size must be positive"),
        ({"bounds": (0.5, None)}, ValueError, "x must lie within bounds"),
        ({"frozen": [True, False]}, ValueError, r"frozen must have shape \(6"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer"),
        ({"y": torch.tensor([0, 2])}, ValueError, r"y must lie in 0..1 for 2 outputs, got 0..2"),
        ({"y": torch.tensor([0.0, 1.0])}, TypeError, "integer class indices"),
        ({"y": torch.tensor([0])}, ValueError, r"y must have shape \(2"),
        ({"x": torch.zeros(2, 6, dtype=torch.long)}, TypeError, "floating-point"),
        ({"model": "net"}, TypeError, "model must be a fitted"),
        ({"model": lambda x: x[:, 0]}, ValueError, r"outputs of shape \(1, classes\)"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {
        "model": Linear(), "x": torch.zeros(2, 6, dtype=torch.float64),
        "y": torch.tensor([0, 1]), "eps": 0.1,
    } | change  # fmt: skip
    with pytest.raises(error, match=message):
        pgd_attack(**arguments)


def test_report_refuses():
    model, X, y = rfam()
    with pytest.raises(ValueError, match="attack must be one of published, strong"):
        robustness_report(model, X, y, attack="weak")
    with pytest.raises(ValueError, match="an attack setting must be one of"):
        robustness_report(model, X, y, attack={"step": 3})
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        robustness_report(model, X[:0], y[:0])
    with pytest.raises(TypeError, match="needs a classifier, got RFAMRegressor"):
        robustness_report(RFAMRegressor().fit(X, X[:, 0]), X, y)
    with pytest.raises(AttributeError, match="machine_"):
        robustness_report(RFAMClassifier(), X, y)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("best_iterate", [True, False])
def test_one_class_cannot_be_turned(best_iterate, implementation, monkeypatch):
    if implementation == "native" and _load.cpu_error is not None:
        pytest.skip("needs the native kernels")
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    x = np.random.default_rng(0).normal(size=(12, 3))
    model = RFAMClassifier().fit(x, np.full(12, 7))
    attack = {"best_iterate": best_iterate, "steps": 3}
    report = robustness_report(model, x, np.full(12, 7), eps=[0.5, 1.0], attack=attack)
    assert report.robust_accuracy == [1.0, 1.0, 1.0]
    assert report.accuracy_at_result == [1.0, 1.0, 1.0]
