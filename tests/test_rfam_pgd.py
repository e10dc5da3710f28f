"""The attack on kernel machines against one written with autograd in float64."""

import dataclasses

import pytest
import torch

from normalign._rfam_fit import fit
from normalign._rfam_pgd import attack_loss, pgd
from normalign.testing import instruction_set, isa_names


@pytest.fixture(autouse=True)
def _one_thread():
    """Small arrays: more threads only wait for each other."""
    torch.set_num_threads(1)


def _machine(n=60, d=5, c=3, dtype=torch.float64, **settings):
    x = torch.randn(n, d, dtype=dtype)
    y = torch.nn.functional.one_hot((x[:, :c]).argmax(1), c).to(dtype)
    return fit(x, y, n_iter=2, reg=0.1, **settings).machine


def _by_autograd(machine, x, targets, start, *, eps, step, iters, loss, norm):
    m = machine.feature_matrix
    z = machine.points @ torch.linalg.pinv(machine.factor.to(m.dtype)) + machine.mean
    current = start.clone()
    for _ in range(iters):
        current.requires_grad_()
        delta = current[:, None] - z[None]
        f = torch.exp(-((delta @ m) * delta).sum(-1).sqrt() / 10) @ machine.dual_coef
        (g,) = torch.autograd.grad(attack_loss(f, targets, loss).sum(), current)
        with torch.no_grad():
            if norm == "linf":
                current = x + (current + step * g.sign() - x).clamp(-eps, eps)
            else:
                radius = torch.as_tensor(eps, dtype=x.dtype).expand(x.shape[1])
                moving = radius > 0
                direction = radius * g
                move = current + step * direction / direction.norm(dim=1, keepdim=True) - x
                share = torch.zeros_like(x)
                share[:, moving] = move[:, moving] / radius[moving]
                current = x + radius * share / share.norm(dim=1, keepdim=True).clamp(min=1)
    return current


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("loss", ["mse", "margin", "cross_entropy"])
@pytest.mark.parametrize("eps", [0.5, (0.0, 0.05, 0.5, 2.0, 0.0)])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_follows_the_autograd_attack(loss, norm, eps, implementation, monkeypatch):
    """A ball, or an ellipsoid with two features that may not move."""
    monkeypatch.setenv("NORMALIGN_IMPL", implementation)
    machine = _machine()
    step = 0.05
    if isinstance(eps, tuple):
        eps = torch.tensor(eps, dtype=torch.float64)
        step = 0.3 * eps  # so that iterates meet the border
    x = torch.randn(9, 5, dtype=torch.float64)
    targets = torch.nn.functional.one_hot(torch.arange(9) % 3, 3).double()
    start = x + 0.2 * eps * torch.rand_like(x)
    settings = {"eps": eps, "step": step, "iters": 8, "loss": loss, "norm": norm}
    exact = _by_autograd(machine, x, targets, start, **settings)
    result = pgd(machine, x, targets, start=start, **settings)
    torch.testing.assert_close(result.x, exact)
    torch.testing.assert_close(result.outputs, machine.decision(exact))
    torch.testing.assert_close(result.value, attack_loss(machine.decision(exact), targets, loss))
    assert (result.zero_gradients == 0).all()


def test_best_iterate_is_never_worse_than_the_start():
    machine = _machine(dtype=torch.float32)
    x = torch.randn(30, 5)
    targets = torch.nn.functional.one_hot(torch.arange(30) % 3, 3).float()
    clean = attack_loss(machine.decision(x), targets, "margin")
    result = pgd(machine, x, targets, eps=1.0, step=0.7, iters=5, select="margin")
    assert (result.value >= clean).all()
    reached = attack_loss(machine.decision(result.x), targets, "margin")
    torch.testing.assert_close(reached, result.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(machine.decision(result.x), result.outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 15, 17, 33, 50, 97])
def test_a_row_does_not_depend_on_its_block(m, dtype, isa):
    """Blocks have from one vector of points to three, the last one filled more or less."""
    machine = _machine(n=55, dtype=dtype)
    x = torch.randn(m, 5, dtype=dtype)
    targets = torch.nn.functional.one_hot(torch.arange(m) % 3, 3).to(dtype)
    eps = torch.full((5,), 0.3, dtype=dtype)
    with instruction_set(isa):
        whole = pgd(machine, x, targets, eps=0.3, step=0.05, iters=4, select="margin")
        alone = [
            pgd(machine, x[i : i + 1], targets[i : i + 1], eps=eps, step=0.05 / 0.3 * eps, iters=4,
                select="margin").x
            for i in range(0, m, 7)
        ]  # fmt: skip
        torch.set_num_threads(2)
        shared = pgd(machine, x, targets, eps=0.3, step=0.05, iters=4, select="margin")
        torch.set_num_threads(1)
    assert torch.equal(shared.x, whole.x)
    torch.testing.assert_close(torch.cat(alone), whole.x[::7])
    wide = dataclasses.replace(
        machine, points=machine.points.double(), dual_coef=machine.dual_coef.double()
    )
    exact = _by_autograd(wide, x.double(), targets.double(), x.double(), eps=0.3, step=0.05,
                         iters=4, loss="mse", norm="linf")  # fmt: skip
    last = pgd(machine, x, targets, eps=0.3, step=0.05, iters=4).x.double()
    # Signs of gradients near 0 differ by rounding: such coordinates take other steps.
    assert ((last - exact).abs() < 1e-4).double().mean() > (0.97 if m > 15 else 0.8)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l2_steps_along_denormal_gradients(dtype, isa):
    # The gradient points away from the only training point, however little is left of it.
    points = torch.zeros(1, 2, dtype=dtype)
    machine = fit(points, torch.ones(1, 1, dtype=dtype), alpha=1.0, bandwidth=1.0, n_iter=1).machine
    distance = 96.0 if dtype is torch.float32 else 730.0  # e^-D is a denormal number
    x = distance * torch.tensor([[0.6, 0.8]], dtype=dtype)
    target = torch.ones(1, 1, dtype=dtype)
    with instruction_set(isa):
        result = pgd(machine, x, target, eps=2.0, step=0.5, iters=2, norm="l2")
    torch.testing.assert_close(result.x, x * (1 + 1 / distance), rtol=1e-3, atol=0.0)
    assert result.zero_gradients.tolist() == [0]


def test_frozen_features_and_bounds():
    machine = _machine(dtype=torch.float32)
    x = torch.rand(20, 5)
    targets = torch.nn.functional.one_hot(torch.arange(20) % 3, 3).float()
    eps = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    low, high = torch.zeros(5), torch.ones(5)
    result = pgd(machine, x, targets, eps=eps, step=0.1, iters=6, lower=low, upper=high)
    assert torch.equal(result.x[:, 0], x[:, 0])
    assert ((result.x - x).abs() <= eps + 1e-6).all()
    assert ((result.x >= 0) & (result.x <= 1)).all()


def test_standing_on_the_only_training_point_is_reported():
    machine = _machine(n=1)
    x = machine.mean.unsqueeze(0) + 0.0
    result = pgd(machine, x, torch.zeros(1, 3, dtype=x.dtype), eps=1.0, step=0.1, iters=3)
    assert result.zero_gradients.tolist() == [3]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loss": "hinge"}, ValueError, "loss must be one of mse, margin, cross_entropy, got"),
        ({"norm": "l1"}, ValueError, "norm must be one of linf, l2, got 'l1'"),
        ({"start": torch.zeros(1, 2)}, ValueError, r"start must have shape \(4, 5\)"),
        ({"iters": -1}, ValueError, "iters must be an integer of at least 0"),
    ],
)
def test_bad_input(settings, error, message):
    machine = _machine()
    x, targets = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    with pytest.raises(error, match=message):
        pgd(machine, x, targets, **{"eps": 1.0, "step": 0.1, "iters": 2, **settings})
