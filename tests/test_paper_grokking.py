"""The parts of the paper's experiments that could be wrong without anyone noticing."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import numpy as np
import paper_grokking
import pytest
import torch
from grokking import claims, cost, report, runner, theory
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


def test_interval_is_students():
    # By hand: mean 3, deviation sqrt(2.5), and 2.776 is the tables' 97.5% point at 4 degrees.
    half = 2.776 * math.sqrt(2.5 / 5)
    found = report.interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert found == pytest.approx((3, 3 - half, 3 + half), rel=1e-3)


def _row(method, seed, grokked, cpu=1.0):
    spec = runner.Spec("parity", method, seed)
    row = {"key": spec.key, "task": "parity", "method": method, "seed": seed, "cap": 5000}
    row |= {"weight": spec.weight_used, "samples": 1000, "memorised": 5, "grokked": grokked}
    return row | {"cpu": cpu, "epochs": grokked or 5000, "history": []}


def test_report_says_what_fails_and_what_is_missing(tmp_path):
    rows = [_row("baseline", s, 1000 + s) for s in range(3)]
    rows += [_row("orthogonal", s, 40, cpu=3.0) for s in range(3)]
    rows += [_row("joint", s, 2000 if s else None) for s in range(3)]
    rows += [_row("joint_authors", 1, 90, cpu=2.0), _row("orthogonal", 9, 1)]
    bars = claims.bars(rows, ["parity"]).splitlines()[2:]
    assert [line.endswith("| holds |") for line in bars] == [True, False, False, True]
    assert "40 against 1001: 25.0x" in bars[0]  # seed 9 has no baseline and does not count
    assert "3 s against 2 s | **does not hold**" in bars[1]
    assert claims.order([_row("grokfast", 0, 30), *rows], ["parity"]).count("not first") == 1
    missing = claims.gaps(rows, ["parity"])
    assert "Grokfast (not run)" in missing
    assert "authors' algorithm (1 seed)" in missing
    assert "Baseline" not in missing
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = report.write(path, tmp_path, ["parity", "xor"]).read_text()
    assert "| GrokAlign, joint | 0.1 | 2 of 3 | 2000 |" in text
    assert "no clearly different" not in text  # no pairs, no verdict


def test_costs_are_added_to_the_file(tmp_path, monkeypatch):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"xor": {"baseline": 80.0}}))
    measure = cost.epochs
    monkeypatch.setattr(cost, "epochs", lambda tasks: measure(tasks, seconds=0))
    cost.write(["parity"], path)
    found = json.loads(path.read_text())
    assert found["xor"] == {"baseline": 80.0}
    assert set(found["parity"]) == set(cost.METHODS)
    assert 0.1 < found["parity"]["baseline"] < found["parity"]["joint_authors"]  # about 4 times


def test_planned_sets():
    for specs in paper_grokking.SETS.values():
        assert all(s.task in TASKS and s.method in METHODS for s in specs)
        compared = {(s.task, s.method) for s in specs if s.weight is None}
        assert {(t, m) for t in paper_grokking.PAPER for m in ("baseline", "joint")} <= compared
        assert ("xor", "egalitarian") not in compared  # hours


def test_readme_quotes_the_report():
    root = pathlib.Path(paper_grokking.__file__).parents[1]
    section = (root / "README.md").read_text().split("## What the paper's runs gave\n")[1]
    quoted = [s for s in section.split("\n## ")[0].splitlines() if s.startswith("|")]
    report_lines = (root / "bench/results/paper.md").read_text().splitlines()
    assert len(quoted) > 2
    assert [line for line in quoted if line not in report_lines] == []
