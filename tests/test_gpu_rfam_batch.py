"""RFAM on many small problems at once gives what one fit after another gives."""

import numpy as np
import pytest
import torch

from normalign import _rfam_batch, _rfam_fit
from normalign._rfam_tables import Problem, Queries, Tables
from normalign.testing import gpu_devices, on_gpu


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


def _table(n, d, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator)
    labels = (x[:, :classes].argmax(1) + (x[:, -1] > 1)) % classes
    return x, labels


def _one_hot(labels, classes):
    return torch.nn.functional.one_hot(labels, classes).float()


def _alone(x, y, problem, n_iter, **more):
    """The same fit by itself, in float64 on the CPU's reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        return _rfam_fit.fit(
            x, y, alpha=problem.alpha, reg=problem.reg, bandwidth=3.0, n_iter=n_iter, **more
        )


@pytest.fixture(scope="module")
def data():
    """Two tables of different sizes, the second with a constant column and a copy of another."""
    made = [_table(90, 4, 3, 0), _table(61, 5, 3, 1)]
    made[1][0][:, 2] = 0.5
    made[1][0][:, 3] = made[1][0][:, 1]
    return made


PROBLEMS = [Problem(t, a, r) for t in (0, 1) for a in (0.0, 1.0) for r in (1.0, 1e-3)]


def test_fits(device, data):
    x, y = [x for x, _ in data], [_one_hot(labels, 3) for _, labels in data]
    tables = Tables(x, y, device)
    found = _rfam_batch.fit(tables, PROBLEMS, bandwidth=3.0, n_iter=4)
    assert found.best_iter == [3] * len(PROBLEMS)
    for b, problem in enumerate(PROBLEMS):
        want = _alone(x[problem.table], y[problem.table], problem, 4).machine
        got = found.machines.machine(b)
        torch.testing.assert_close(
            got.feature_matrix.cpu(), want.feature_matrix, rtol=1e-7, atol=1e-7
        )
        points = torch.randn(9, x[problem.table].shape[1])
        torch.testing.assert_close(
            got.decision(points.to(device)).cpu(), want.decision(points), rtol=1e-5, atol=1e-5
        )


def test_validation_chooses_the_iteration(device, data):
    x, labels = [x[:50] for x, _ in data], [y for _, y in data]
    y = [_one_hot(label[:50], 3) for label in labels]
    tables = Tables(x, y, device)
    valid = Queries(tables, [x[50:] for x, _ in data], [label[50:].numpy() for label in labels])
    found = _rfam_batch.fit(tables, PROBLEMS, bandwidth=3.0, valid=valid)
    for b, problem in enumerate(PROBLEMS):
        t = problem.table
        expected = labels[t][50:]
        want = _alone(
            x[t], y[t], problem, 5, x_val=data[t][0][50:],
            evaluate=lambda f, e=expected: (f.argmax(1) == e).double().mean().item(),
        )  # fmt: skip
        assert found.scores[b] == [entry["score"] for entry in want.history]
        assert found.best_iter[b] == want.best_iter
        assert found.machines.scores(valid)[b] == want.history[want.best_iter]["score"]
        torch.testing.assert_close(
            found.machines.machine(b).feature_matrix.cpu(), want.machine.feature_matrix,
            rtol=1e-7, atol=1e-7,
        )  # fmt: skip


def test_regression_scores(device, data):
    x = [x[:50] for x, _ in data]
    y = [torch.stack((x[:, 0] * x[:, 1], x[:, 1].sin()), 1) for x, _ in data]
    tables = Tables(x, [part[:50] for part in y], device)
    valid = Queries(tables, [x[50:] for x, _ in data], [part[50:].double().numpy() for part in y])
    found = _rfam_batch.fit(tables, PROBLEMS[::2], bandwidth=3.0, n_iter=2, valid=valid)
    for b, problem in enumerate(PROBLEMS[::2]):
        expected = valid.expected[problem.table]
        outputs = found.machines.machine(b).decision(data[problem.table][0][50:].to(device))
        residual = np.square(outputs.cpu().numpy() - expected).sum()
        r2 = 1 - residual / np.square(expected - expected.mean(0)).sum()
        assert found.scores[b][found.best_iter[b]] == pytest.approx(r2, abs=1e-5)


def test_jitter_where_it_is_needed_alone(device):
    """A table of copies with reg = 0 climbs the ladder; its neighbours do not notice."""
    x, labels = _table(40, 3, 2, 2)
    twice = torch.cat((x, x))
    y = [_one_hot(labels, 2), _one_hot(labels, 2).repeat(2, 1), _one_hot(labels, 2)]
    tables = Tables([x, twice, x], y, device)
    problems = [Problem(0, 0.0, 0.0), Problem(1, 0.0, 0.0), Problem(2, 0.0, 1e-3)]
    with pytest.warns(RuntimeWarning, match="not positive definite") as caught:
        found = _rfam_batch.fit(tables, problems, bandwidth=3.0, n_iter=1)
    assert len(caught) == 1
    assert found.machines.jitter[0] == found.machines.jitter[2] == 0.0
    assert found.machines.jitter[1] > 0
    with pytest.warns(RuntimeWarning, match="not positive definite"):
        want = _alone(twice, y[1], problems[1], 1).machine
    assert found.machines.jitter[1] == want.jitter
    got = found.machines.machine(1).decision(x.to(device)).cpu()
    torch.testing.assert_close(got, want.decision(x), rtol=1e-4, atol=1e-4)


def test_a_system_that_no_jitter_helps(device):
    """The error comes at the end, as one fit alone has it, and what was not solved is NaN."""
    x, labels = _table(40, 3, 2, 2)
    y = _one_hot(labels, 2)
    tables = Tables([x], [y], device)
    problems = [Problem(0, 0.0, 0.1), Problem(0, 0.0, -2.0)]
    with pytest.raises(ValueError, match="could not be factored"):
        _rfam_batch.fit(tables, problems, bandwidth=3.0, n_iter=3)
    factor = torch.eye(3, dtype=torch.float64, device=device).expand(2, 3, 3)
    with pytest.raises(ValueError, match="could not be factored"):
        _rfam_batch.solve(tables, [0, 0], factor, [0.1, -2.0], 3.0)
    with pytest.raises(ValueError, match="could not be factored"):
        _alone(x, y, problems[1], 3)


def test_features_lose_rank_while_fitting(device):
    """Dependent columns that alpha = 1 does not know of, fewer points than features, one class."""
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(12, 20, generator=generator)
    dependent, labels = _table(60, 9, 3, 4)
    dependent[:, 5:] = dependent[:, :4] @ torch.randn(4, 4, generator=generator)
    x = [dependent, wide, dependent]
    y = [_one_hot(labels, 3), _one_hot(wide[:, :3].argmax(1), 3), _one_hot(labels * 0, 3)]
    tables = Tables(x, y, device)
    problems = [Problem(t, a, 1e-2) for t in range(3) for a in (1.0, 0.5)]
    found = _rfam_batch.fit(tables, problems, bandwidth=3.0, n_iter=4)
    for b, problem in enumerate(problems):
        want = _alone(x[problem.table], y[problem.table], problem, 4).machine
        got = found.machines.machine(b)
        torch.testing.assert_close(
            got.feature_matrix.cpu(), want.feature_matrix, rtol=1e-7, atol=1e-7
        )


def test_constant_table_and_bad_input(device):
    """Where nothing varies M is 0 and stays so; NaN is refused by name."""
    y = _one_hot(torch.tensor([0, 1, 0, 1]), 2)
    x = torch.ones(4, 3)
    tables = Tables([x, torch.randn(4, 3)], [y, y], device)
    problems = [Problem(0, 0.0, 0.1), Problem(0, 1.0, 0.1), Problem(1, 0.0, 0.1)]
    found = _rfam_batch.fit(tables, problems, bandwidth=3.0, n_iter=3)
    for b, problem in enumerate(problems):
        want = _alone(tables.raw[problem.table], y, problem, 3).machine
        got = found.machines.machine(b).feature_matrix.cpu()
        torch.testing.assert_close(got, want.feature_matrix, rtol=1e-7, atol=1e-7)
    x[1, 1] = float("nan")
    with pytest.raises(ValueError, match="X must be finite"):
        Tables([x], [y], device)
    y[0, 1] = float("inf")
    with pytest.raises(ValueError, match="y must be finite"):
        Tables([torch.ones(4, 3)], [y], device)


def test_tables_of_other_classes_go_apart(device):
    """An output that only fills up is 0, and greater than those of a class that is not there."""
    x = [torch.randn(n, 3) for n in (9, 7)]
    with pytest.raises(ValueError, match=r"as many columns in every table, got \[2, 4\]"):
        Tables(x, [torch.randn(9, 2), torch.randn(7, 4)], device)
