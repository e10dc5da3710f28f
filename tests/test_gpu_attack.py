"""Attacks on kernel machines in one launch, emulated here and on the GPU where there is one."""

import numpy as np
import pytest
import torch

import normalign
from normalign import _attack_input, _load, _rfam_attack_cuda, _rfam_base, _rfam_pgd, reference
from normalign._rfam_machine import Machine, project
from normalign.testing import DTYPES, gpu_devices, on_gpu

LOSSES = ("mse", "margin", "cross_entropy")


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _machine(n, d, r, c, dtype, device, kernel="laplace"):
    options = {"dtype": torch.float64, "device": device}
    mean = torch.randn(d, **options).to(dtype)
    factor = torch.randn(d, r, **options) / max(d, 1) ** 0.5
    x = torch.randn(n, d, **options).to(dtype)
    points = project(x, mean, factor, dtype)
    coef = torch.randn(n, c, **options).to(dtype)
    return Machine(mean, factor, points, coef, 2.0, kernel), x


def _rows(m, d, c, dtype, device, radius=0.3):
    x = torch.randn(m, d, dtype=dtype, device=device)
    targets = torch.eye(c, dtype=dtype, device=device)[torch.arange(m, device=device) % c]
    return x, targets, x + radius * (2 * torch.rand_like(x) - 1)


def _defined(machine, x, targets, start, *, eps, step, iters, loss, norm, select, bounds):
    """The attack in float64 from the definitions, with the smallest |gradient| on the way."""
    mean, factor = machine.mean.double(), machine.factor
    z, coef = machine.points.double(), machine.dual_coef.double()
    kernel = machine.packed.kernel
    x, targets, current = x.double(), targets.double(), start.double()
    lower, upper = bounds
    best = torch.full((len(x),), -torch.inf, dtype=torch.float64, device=x.device)
    point, outputs = current.clone(), None
    zero = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    least = torch.full_like(x, torch.inf)
    for iteration in range(iters + 1):
        u = (current - mean) @ factor
        f = reference.laplace_matvec(u, z, coef, None, kernel.length, kernel.exponent)
        by = "margin" if select == "margin" else loss
        reached = _rfam_pgd.attack_loss(f, targets, by)
        better = (reached > best) | (select == "last")
        best = torch.where(better, reached, best)
        point[better] = current[better]
        outputs = f if outputs is None else torch.where(better[:, None], f, outputs)
        if iteration == iters:
            return point, best, outputs, zero, least
        v = _rfam_pgd.loss_cotangent(f, targets, loss)
        g = reference.input_gradient(u, z, coef, v, None, kernel.length, kernel.exponent)
        g = g @ factor.T
        zero += (g == 0).all(1)
        least = torch.minimum(least, g.abs())
        if norm == "linf":
            current = x + (current + step * g.sign() - x).clamp(-eps, eps)
        else:
            direction = eps * g
            size = direction.norm(dim=1, keepdim=True)
            move = current + step * direction / torch.where(size > 0, size, 1.0) - x
            ratio = torch.where(eps > 0, move / torch.where(eps > 0, eps, 1.0), 0.0)
            shrink = 1 / ratio.norm(dim=1, keepdim=True).clamp(min=1.0)
            current = x + torch.where(eps > 0, move * shrink, 0.0)
        if lower is not None:
            current = torch.maximum(current, lower.double())
        if upper is not None:
            current = torch.minimum(current, upper.double())
    raise AssertionError


def _compare(machine, x, targets, start, eps, step, iters, bounds=(None, None), **how):
    got = _rfam_attack_cuda.attack_machine(
        machine, x, targets, start, eps, step, iterations=iters, lower=bounds[0], upper=bounds[1],
        **how,
    )  # fmt: skip
    eps64 = torch.as_tensor(eps, dtype=torch.float64, device=x.device).expand(x.shape[1])
    step64 = torch.as_tensor(step, dtype=torch.float64, device=x.device).expand(x.shape[1])
    point, value, outputs, zero, least = _defined(
        machine, x, targets, start, eps=eps64, step=step64, iters=iters, bounds=bounds, **how
    )
    # Sums over n of terms of size 1 through a few layers. A sign step magnifies any rounding of a
    # gradient near 0, so rows that meet one are left out; they must be few.
    exact = x.dtype is torch.float64
    sure = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if how["norm"] == "linf":
        moving = least[:, eps64 > 0]
        sure = (moving > (1e-10 if exact else 1e-4)).all(1)
        assert sure.double().mean() > 0.7 or len(x) < 4
    tolerance = 1e-10 if exact else 2e-5
    scale = 1 + machine.dual_coef.abs().sum(0).max().item() ** 0.5
    for a, b in ((got.points, point), (got.value, value), (got.outputs, outputs)):
        assert a.dtype is x.dtype
        difference = torch.nan_to_num((a[0, 0].double() - b)[sure].abs())  # inf - inf
        assert difference.numel() == 0 or difference.max().item() <= tolerance * scale
    assert torch.equal(got.zero_gradients[0, 0][sure], zero[sure])
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("select", ["last", "loss", "margin"])
def test_follows_the_definition(device, dtype, loss, norm, select):
    machine, _ = _machine(37, 5, 4, 3, dtype, device)
    rows = _rows(11, 5, 3, dtype, device)
    _compare(machine, *rows, 0.3, 0.07, 4, loss=loss, norm=norm, select=select)


@pytest.mark.parametrize("kernel", ["gaussian", 0.7])
def test_other_kernels(device, kernel):
    machine, _ = _machine(20, 3, 3, 2, torch.float32, device, kernel)
    rows = _rows(6, 3, 2, torch.float32, device)
    _compare(machine, *rows, 0.3, 0.05, 3, loss="mse", norm="linf", select="last")


@pytest.mark.parametrize(
    ("m", "n", "d", "r", "c"),
    [
        (1, 1, 1, 1, 1), (31, 33, 1, 1, 2), (32, 31, 33, 32, 2), (33, 32, 31, 31, 33),
        (7, 257, 13, 7, 17), (3, 300, 2, 2, 8), (5, 9, 40, 3, 9),
    ],
)  # fmt: skip
def test_sizes(device, m, n, d, r, c):
    machine, _ = _machine(n, d, r, c, torch.float64, device)
    rows = _rows(m, d, c, torch.float64, device)
    _compare(machine, *rows, 0.3, 0.1, 2, loss="margin", norm="l2", select="loss")
    _compare(machine, *rows, 0.3, 0.1, 2, loss="mse", norm="linf", select="last")


def test_enough_points_fill_blocks_of_eight_rows(device):
    """From 264 such blocks on."""
    machine, _ = _machine(9, 2, 2, 2, torch.float64, device)
    rows = _rows(8 * 263 + 3, 2, 2, torch.float64, device)
    _compare(machine, *rows, 0.3, 0.1, 1, loss="mse", norm="linf", select="last")


def test_empty(device):
    machine, _ = _machine(5, 3, 2, 2, torch.float32, device)
    found = _rfam_pgd.pgd(machine, *(t[:0] for t in _rows(2, 3, 2, torch.float32, device)[:2]),
                          eps=0.1, step=0.1, iters=2)  # fmt: skip
    assert found.x.shape == (0, 3)
    assert found.value.shape == found.zero_gradients.shape == (0,)
    none = Machine(
        machine.mean, machine.factor[:, :0], machine.points[:, :0], machine.dual_coef, 2.0
    )  # no features: f is constant
    x, targets, start = _rows(4, 3, 2, torch.float32, device)
    got = _rfam_pgd.pgd(none, x, targets, eps=0.3, step=0.1, iters=2, start=start)
    assert torch.equal(got.x, start.clamp(x - 0.3, x + 0.3))
    assert got.zero_gradients.tolist() == [2] * 4


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_frozen_features_bounds_and_strides(device, norm):
    machine, _ = _machine(30, 5, 5, 3, torch.float64, device)
    x, targets, start = _rows(9, 10, 6, torch.float64, device)
    x, start, targets = x[:, ::2], start[:, ::2], targets[:, :3].contiguous()
    targets = targets.t().contiguous().t()
    eps = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64, device=device)
    start = torch.minimum(torch.maximum(start, x - eps), x + eps)
    low, high = x.min(0).values - 0.1, x.max(0).values + 0.05
    start = torch.minimum(torch.maximum(start, low), high)
    got = _compare(
        machine, x, targets, start, eps, eps / 3, 4, (low, high), loss="mse", norm=norm,
        select="margin",
    )  # fmt: skip
    assert torch.equal(got.points[0, 0, :, 0], x[:, 0])
    assert (got.points[0, 0] >= low).all()
    assert (got.points[0, 0] <= high).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_standing_on_a_training_point(device, dtype):
    """Its own term has no gradient there; a machine of one point has none at all."""
    machine, x = _machine(1, 4, 4, 2, dtype, device)
    targets = torch.eye(2, dtype=dtype, device=device)[:1]
    got = _rfam_pgd.pgd(machine, x, targets, eps=0.5, step=0.1, iters=3)
    assert torch.equal(got.x, x)
    assert got.zero_gradients.item() == 3
    machine, x = _machine(40, 4, 4, 2, dtype, device)
    rows = x[:8], targets.repeat(8, 1), x[:8]
    _compare(machine, *rows, 0.3, 0.1, 1, loss="mse", norm="linf", select="last")


def test_nan_stays_in_its_row(device):
    machine, _ = _machine(20, 3, 3, 2, torch.float32, device)
    x, targets, start = _rows(5, 3, 2, torch.float32, device)
    x[2, 1] = start[2, 1] = float("nan")
    for select in ("last", "margin"):
        found = _rfam_pgd.pgd(
            machine, x, targets, eps=0.3, step=0.1, iters=2, start=start, select=select
        )
        assert torch.isfinite(found.x[[0, 1, 3, 4]]).all()
        assert torch.isnan(found.x[2, 1])


def test_a_batch_of_machines_of_different_sizes(device):
    """Padded with zeros, all in one launch, and the same bits as one by one."""
    sizes = ((20, 4), (17, 3), (23, 4))
    machines = [_machine(n, 4, r, 3, torch.float32, device)[0] for n, r in sizes]
    rows = [_rows(6 + i, 4, 3, torch.float32, device) for i in range(3)]
    radii = torch.tensor([[0.1], [1.0]], device=device).expand(2, 4)

    def stacked(tensors, shape):
        out = tensors[0].new_zeros(len(tensors), *shape)
        for slot, t in zip(out, tensors, strict=True):
            slot[tuple(slice(0, size) for size in t.shape)] = t
        return out

    before = _load._emu.launches() if device.type == "cpu" else 0
    found = _rfam_attack_cuda.attack(
        stacked([a.points for a in machines], (23, 4)),
        stacked([a.dual_coef for a in machines], (23, 3)),
        torch.stack([a.mean for a in machines]),
        stacked([a.factor for a in machines], (4, 4)),
        stacked([x for x, _, _ in rows], (8, 4)),
        stacked([targets for _, targets, _ in rows], (8, 3)),
        stacked([torch.stack([start, start]) for _, _, start in rows], (2, 8, 4)),
        radii, radii / 10, length=2.0, exponent=1.0, iterations=3,
    )  # fmt: skip
    if device.type == "cpu":
        assert _load._emu.launches() == before + 1
    for p, (machine, (x, targets, start)) in enumerate(zip(machines, rows, strict=True)):
        for e in range(2):
            alone = _rfam_attack_cuda.attack_machine(
                machine, x, targets, start, radii[e], radii[e] / 10, iterations=3, loss="mse",
                norm="linf", select="last", lower=None, upper=None,
            )  # fmt: skip
            for name in ("points", "value", "outputs", "zero_gradients"):
                got = getattr(found, name)[p, e, : len(x)]
                # Padding changes the order of a sum's partial sums.
                torch.testing.assert_close(got, getattr(alone, name)[0, 0], rtol=2e-5, atol=2e-5)


def test_machines_too_large_take_the_other_way(device, monkeypatch):
    machine, _ = _machine(12, 3, 3, 2, torch.float64, device)
    x, targets, start = _rows(5, 3, 2, torch.float64, device)
    settings = {"eps": 0.3, "step": 0.05, "iters": 3, "start": start, "select": "margin"}
    fused = _rfam_pgd.pgd(machine, x, targets, **settings)
    big = torch.empty(1, 40000, 2, device=device)
    assert not _rfam_attack_cuda.fits(big, big, 2)
    monkeypatch.setattr(_rfam_attack_cuda, "serves", lambda machine: False)
    other = _rfam_pgd.pgd(machine, x, targets, **settings)
    torch.testing.assert_close(fused.x, other.x)
    torch.testing.assert_close(fused.value, other.value)
    assert torch.equal(fused.zero_gradients, other.zero_gradients)


def _fitted(**options):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((80, 4)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    return normalign.RFAMClassifier(reg=1e-2, random_state=0, **options).fit(x, y), x[:30], y[:30]


def test_fitted_estimators_are_attacked_by_one_launch_for_each_radius(device):
    model, x, y = _fitted(device="cuda" if device.type == "cuda" else "cpu")
    before = _load._emu.launches() if device.type == "cpu" else 0
    report = normalign.robustness_report(
        model, x, y, eps=(0.1, 1.0), attack="published", measures=False, certify=False
    )
    if device.type == "cpu":
        # The clean outputs; for each radius: one row's outputs, and the attack.
        assert _load._emu.launches() - before == 1 + 2 * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        model.device = "cpu"
        want = normalign.robustness_report(
            model, x, y, eps=(0.1, 1.0), attack="published", measures=False, certify=False
        )
    assert report.robust_accuracy == pytest.approx(want.robust_accuracy, abs=1 / 30 + 1e-9)
    assert report.robust_accuracy[2] < report.robust_accuracy[0]


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_bounds_and_ellipsoids_are_one_launch_too(device, norm):
    model, x, y = _fitted(device="cuda" if device.type == "cuda" else "cpu")
    low, high, eps = x.min(0) - 0.1, x.max(0) + 0.05, np.array([0.0, 0.2, 0.4, 0.8])
    settings = {"eps": eps, "norm": norm, "steps": 5, "bounds": (low, high), "best_iterate": False}
    before = _load._emu.launches() if device.type == "cpu" else 0
    found = normalign.pgd_attack(model, x, y, **settings)
    if device.type == "cpu":
        # One row's outputs, to see how many there are; the attack.
        assert _load._emu.launches() - before == 2
    assert (found >= low).all()
    assert (found <= high).all()
    assert np.array_equal(found[:, 0], x[:, 0])
    ratio = (found - x)[:, 1:] / eps[1:]
    assert np.linalg.norm(ratio, np.inf if norm == "linf" else 2, axis=1).max() <= 1 + 1e-5
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        model.device = "cpu"
        want = normalign.pgd_attack(model, x, y, **settings)
    # Steps along signs may part where a gradient is nearly 0.
    assert np.isclose(found, want, atol=1e-4).all(1).mean() > 0.9


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_same_report_as_on_the_cpu_with_frozen_features(device, norm):
    """Every row takes all steps, turned or not, so the share of zero gradients is the same too."""
    model, x, y = _fitted(device="cuda" if device.type == "cuda" else "cpu")
    x = np.random.default_rng(1).standard_normal(x.shape).astype("float32")
    x[::3] *= 1e6  # where the kernel underflows, in float64 too
    settings = {
        "eps": (0.1, 0.5, 1.0), "attack": {"norm": norm, "steps": 6, "random_start": False},
        "frozen": (1,), "random_state": 0, "measures": False, "certify": False,
    }  # fmt: skip
    found = normalign.robustness_report(model, x, y, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        model.device = "cpu"
        want = normalign.robustness_report(model, x, y, **settings)
    assert 0 < found.zero_gradient_share[1] < 1
    assert found.zero_gradient_share == pytest.approx(want.zero_gradient_share, nan_ok=True)
    assert found.robust_accuracy == want.robust_accuracy
    assert found.robust_accuracy[3] < found.robust_accuracy[0]


def test_the_attack_runs_where_the_estimator_computes(device, monkeypatch):
    model, x, y = _fitted()
    asked = []

    def moved(machine, where):
        asked.append(where)
        return _rfam_base._moved(machine, device)

    monkeypatch.setattr(_attack_input, "_moved", moved)
    monkeypatch.setattr(_attack_input, "_available", lambda name: True)
    if device.type == "cpu":  # the emulated kernels' tensors are on the host
        monkeypatch.setattr(model, "device", "cpu:0")
    else:
        model.device = "cuda"
    found = normalign.pgd_attack(model, x, y, eps=0.5, steps=3)
    assert asked == [model.device]
    assert isinstance(found, np.ndarray)
    as_tensor = normalign.pgd_attack(model, torch.from_numpy(x), y, eps=0.5, steps=3)
    assert as_tensor.device.type == "cpu"
    np.testing.assert_array_equal(found, as_tensor.numpy())


def test_bad_calls_are_refused():
    if "emulated" not in gpu_devices():
        pytest.skip("asks the emulated kernels")
    emu = _load._emu

    def call(loss=0, machines=1, length=1.0, arrays=0, n=1):
        emu.attack_f32(
            1.0, length, loss, 0, False, 1, [machines, 1, 1, n, 1, 1, 1], [arrays] * 7, 0, 0, 0, 0,
            [0] * 4, 0, 0,
        )  # fmt: skip

    with pytest.raises(ValueError, match="no such loss"):
        call(loss=3)
    with pytest.raises(ValueError, match="at most 65535 machines and radii"):
        call(machines=70000)
    with pytest.raises(ValueError, match="must be positive"):
        call(length=0.0)
    with pytest.raises(ValueError, match="z has no memory"):
        call()
    with pytest.raises(ValueError, match="too large for one block"):
        call(n=100000)
