"""The parts of the paper's experiments that could be wrong without anyone noticing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from grokking import report, runner, theory
from grokking.methods import METHODS, make_optimizer, make_step
from grokking.tasks import TASKS, tokens, xor, xor_full
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("method", ["baseline", "orthograd", "grokfast", "orthogonal", "joint"])
def test_reduced_xor_follows_the_full_one(method):
    task, size = TASKS["xor"], {"samples": 12, "p": 500, "width": 20}
    outputs = []
    for setup_function in (xor_full, xor):
        torch.manual_seed(3)
        setup = setup_function(**size)
        step = make_step(task, method, setup, 1.0, torch.Generator().manual_seed(5))
        optimizer = make_optimizer(task, method, setup.model.parameters())
        for _ in range(30):
            step(setup.x, setup.y)
            optimizer.step()
        outputs.append(setup.model(torch.cat([setup.x, setup.x_test])).detach())
    assert outputs[0][:12].abs().mean() > 0.1  # it has learned something
    # float32 rounding over 30 steps of two different orders of summation
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-4)


def test_reduced_xor_noise_has_the_full_covariance():
    torch.manual_seed(0)
    full = xor_full(samples=6, p=50, width=10)
    torch.manual_seed(0)
    reduced = xor(samples=6, p=50, width=10)
    draws = 40_000
    noise = reduced.disturb(reduced.x_test[:1].expand(draws, -1)) - reduced.x_test[:1]
    responses = noise @ reduced.model[0].weight.detach().T
    w = full.model[0].weight.detach()[:, 2:]
    expected = 0.04 * w @ w.T
    # Entries of a sample covariance deviate by about sqrt(2 / draws) of the diagonal.
    tolerance = 6 * math.sqrt(2 / draws) * expected.diagonal().max().item()
    torch.testing.assert_close(responses.T @ responses / draws, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_methods_train(method):
    task = dataclasses.replace(TASKS["parity"], weights={method: 0.1})
    torch.manual_seed(0)
    setup = task.setup(samples=50)
    step = make_step(task, method, setup, 0.1, torch.Generator().manual_seed(0))
    optimizer = make_optimizer(task, method, setup.model.parameters())
    before = task.loss(setup.model(setup.x), setup.y).item()
    penalties = []
    for _ in range(20):
        penalties.append(step(setup.x, setup.y))
        optimizer.step()
    assert task.loss(setup.model(setup.x), setup.y).item() < 0.9 * before
    assert all(map(math.isfinite, penalties))
    assert (max(penalties) > 0) == (METHODS[method].penalty is not None)


def test_token_penalty_reaches_embeddings_and_task_does_too():
    torch.manual_seed(0)
    setup = tokens(samples=40, p=7)
    task = TASKS["tokens"]
    gradients = []
    for weight in (0.0, 1.0):
        step = make_step(task, "orthogonal", setup, weight, torch.Generator().manual_seed(0))
        step(setup.x, setup.y)
        gradients.append(setup.model.token.weight.grad.clone())
    task.loss(setup.model(setup.x), setup.y).backward()
    plain = setup.model.token.weight.grad - gradients[1]
    torch.testing.assert_close(gradients[0], plain, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradients[0], gradients[1])


def test_runs_resume_from_the_file(tmp_path):
    path = tmp_path / "runs.jsonl"
    first, second = (runner.Spec("parity", "baseline", seed, epochs=3) for seed in (0, 1))
    assert runner.run_all([first], path) == []
    with path.open("a") as f:
        f.write('{"key": "parity/base')  # killed in the middle of a line
    rows = runner.read(path)
    assert list(rows) == [first.key]
    assert rows[first.key]["grokked"] is None
    assert rows[first.key]["epochs"] == 3
    assert runner.missing([first, second, second], rows) == [second]
    longer = dataclasses.replace(first, epochs=4)
    assert runner.missing([longer], rows) == [longer]
    assert runner.run_all([first, second], path, jobs=2) == []
    assert set(runner.read(path)) == {first.key, second.key}
    assert runner.run_all([longer], path, minutes=0) == [longer]


def test_runs_repeat_exactly():
    spec = runner.Spec("parity", "orthogonal", 7, epochs=4)
    plain, traced = (runner.run(dataclasses.replace(spec, trace=t)) for t in (False, True))
    assert plain["final"].items() <= traced["final"].items()  # measuring changes nothing
    assert 0 < traced["final"]["normal"] <= 1
    assert 1 <= traced["final"]["rank"] <= 2


def test_radii_against_a_line_search():
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    weight = torch.randn(3, 4)
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.tensor([3.0, 0.0, 0.5]))
    logits = linear(x).detach()
    radius = theory.certified_radius(theory.jacobians(linear, x), logits, y)
    directions = F.normalize(torch.randn(60_000, 4), dim=1)
    for i in (logits.argmax(1) == 0).nonzero()[:, 0].tolist():
        rate = directions @ (weight[1:] - weight[0]).T  # (60000, 2)
        gap = (logits[i, 0] - logits[i, 1:]) / rate.clamp(min=1e-9)
        # Random directions never beat the certified radius, and nearly reach it.
        assert radius[i] <= gap.min() * (1 + 1e-5)
        assert radius[i] >= gap.min() * 0.97
    correct = logits.argmax(1) == 0
    attacked = theory.attacked_radius(linear, x, y)
    torch.testing.assert_close(attacked[correct], radius[correct], rtol=2e-3, atol=1e-4)


def test_bootstrap_covers_the_mean():
    differences = torch.randn(40, dtype=torch.float64).numpy() + 3
    mean, low, high = report.bootstrap(differences)
    assert low < mean < high
    # Of 40 unit normals the mean has deviation 0.16; the interval spans about four of them.
    assert high - low == pytest.approx(4 * 0.158, rel=0.35)
