"""Nothing is left behind on the CPU when the data are elsewhere.

No GPU is needed for that: tensors of the ``meta`` device stand for those on a GPU. They hold no
values, so what the code asks of them on the host is answered by a constant; whatever mixes them
with a CPU tensor fails, as it would on a GPU.
"""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normalign
from normalign import (
    _gpu,
    _rfam_batch,
    _rfam_batch_attack,
    _rfam_fit,
    _rfam_pgd,
    _sweep_batch,
    _sweep_task,
)
from normalign._pgd import PUBLISHED, STRONG
from normalign._rfam_tables import Problem, Queries, Tables

META = torch.device("meta")


@pytest.fixture
def elsewhere(monkeypatch):
    """Host questions about meta tensors get an answer; masks on them select everything."""

    def answer(name, make):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda t, *a: make(t) if t.is_meta else original(t, *a))

    answer("__bool__", lambda t: True)
    answer("__float__", lambda t: 0.5)
    answer("__int__", lambda t: 0)
    answer("cpu", lambda t: torch.zeros(t.shape, dtype=t.dtype))
    nonzero, get, put = torch.nonzero, Tensor.__getitem__, Tensor.__setitem__

    def all_rows(t):
        rows = torch.zeros(len(t), 1, dtype=torch.int64, device=t.device)
        return rows if t.is_meta else nonzero(t)

    def select(t, key):
        if t.is_meta and isinstance(key, Tensor) and key.dtype is torch.bool:
            assert key.is_meta, "the mask is on another device"
            return t
        return get(t, key)

    def assign(t, key, value):
        if not t.is_meta:
            return put(t, key, value)
        for part in key if isinstance(key, tuple) else (key,):
            assert not isinstance(part, Tensor) or part.is_meta, "the index is on another device"
        assert not isinstance(value, Tensor) or value.dim() == 0 or value.is_meta
        return None

    monkeypatch.setattr(torch, "nonzero", all_rows)
    monkeypatch.setattr(Tensor, "__getitem__", select)
    monkeypatch.setattr(Tensor, "__setitem__", assign)


def test_the_stand_in_finds_a_tensor_left_behind(elsewhere):
    x = torch.zeros(3, device=META)
    with pytest.raises(RuntimeError, match="device"):
        x + torch.zeros(3)
    with pytest.raises(AssertionError):
        x[torch.zeros(3, dtype=torch.bool)]


def _kernels(monkeypatch, answer=1):
    """Sets up the module of kernels, which serves meta tensors."""
    monkeypatch.setattr(_gpu, "module", lambda device: _AnyKernel(answer))
    monkeypatch.setattr(_gpu, "where", lambda device: (0, 0))
    monkeypatch.setattr(_gpu, "serves", lambda device: device.type == "meta")
    monkeypatch.setattr(_gpu, "unavailable_reason", lambda device: None)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit_and_attack(elsewhere, monkeypatch, dtype, weighted, kernels):
    if kernels:
        _kernels(monkeypatch)
    x, y = (torch.zeros(50, k, device=META, dtype=dtype) for k in (4, 3))
    weight = torch.ones(50, device=META, dtype=dtype) if weighted else None
    machine = _rfam_fit.fit(
        x, y, sample_weight=weight, x_val=x[:5], evaluate=lambda f: 0.0, n_iter=2
    ).machine
    for norm, loss in (("linf", "mse"), ("l2", "margin")):
        attack = _rfam_pgd.pgd(
            machine, x[:7], y[:7], eps=0.1, step=0.1, iters=2, norm=norm, loss=loss, select="loss"
        )
        assert attack.x.is_meta
    assert machine.jacobian(x[:3]).is_meta
    assert machine.agop().is_meta


@pytest.mark.parametrize("validation", [None, 0.2])
@pytest.mark.parametrize("attack", [PUBLISHED, dataclasses.replace(STRONG, norm="l2", steps=2)])
def test_a_fold_of_a_sweep(elsewhere, attack, validation):
    common = _sweep_task.Common(2, None, (0.1,), attack, "float32", validation, 0, None, "meta")
    x, y = np.random.default_rng(0).standard_normal((60, 4)), np.arange(60) % 3
    task = _sweep_task.FoldTask(x, y, 3, np.arange(40), np.arange(40, 60), None, common)
    key = {"alpha": 0.0, "reg": 1e-2, "bandwidth": 3.0, "kernel": "laplace"}
    (row,) = _sweep_task.run_fold(task, [key])
    assert row["rows"] == (40 if validation is None else 32)


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="device must be usable, got 'cuda', but torch finds no"):
        normalign.sweep((np.zeros((8, 2)), np.arange(8) % 2), device="cuda")


class _AnyKernel(int):
    """Stands for the module of CUDA kernels: every launch succeeds, with meta tensors alone.

    A call gives the same again, which also serves as a size, or as an answer.
    """

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.launch

    def launch(self, *arguments):
        for value in arguments:
            if isinstance(value, (list, tuple)):
                self.launch(*value)
            # The address of a meta tensor is 0; sizes are small.
            assert not (isinstance(value, int) and value > 1 << 24), "the address of a CPU tensor"
        return self


def _batched(monkeypatch, failing=False):
    """Sets up the module of kernels; returns a list that grows with every report of jitters."""
    monkeypatch.setattr(_gpu, "module", lambda device: _AnyKernel(1))
    monkeypatch.setattr(_gpu, "where", lambda device: (0, 0))
    solves = []
    original = Tensor.tolist

    def answer(t):
        if not t.is_meta:
            return original(t)
        values = torch.zeros(t.shape, dtype=t.dtype)
        if t.dtype is torch.float64 and t.shape == (3, 4):  # jitters; scores are counts
            solves.append(len(t))
            values[1, 0] = 1e-14 if failing else 0.0
        return original(values)

    monkeypatch.setattr(Tensor, "tolist", answer)
    return solves


@pytest.mark.parametrize("failing", [False, True])
def test_batched_fits_and_attacks(elsewhere, monkeypatch, failing):
    """Also where a factorisation fails, and a jitter is reported."""
    solves = _batched(monkeypatch, failing)
    x = [torch.randn(9, 3), torch.randn(7, 2)]
    y = [torch.eye(2)[torch.arange(len(part)) % 2] for part in x]
    tables = Tables(x, y, META)
    points = Queries(tables, x, [part.argmax(1).numpy() for part in y])
    problems = [Problem(t, alpha, 0.1) for t in (0, 1) for alpha in (0.0, 1.0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _rfam_batch.fit(tables, problems, bandwidth=3.0, n_iter=3, valid=points)
    assert len(solves) == 1  # the host looks once, after the last solve
    assert [w.category for w in caught] == [RuntimeWarning] * failing
    machines = found.machines
    for name in ("factor", "points", "coef", "table", "own_n"):
        assert getattr(machines, name).is_meta, name
    assert machines.machine(1).points.is_meta
    for settings in (PUBLISHED, STRONG):
        figures = _rfam_batch_attack.attacks(machines, points, [0.1], settings, [0, 0])
        assert len(figures) == len(problems)
    assert len(_rfam_batch_attack.measures(machines, x)) == len(problems)


def test_a_table_of_a_sweep(elsewhere, monkeypatch):
    """All folds at once."""
    _batched(monkeypatch)
    common = _sweep_task.Common(3, None, (0.1,), PUBLISHED, "float32", 0.2, 0, None, "meta")
    x, y = np.random.default_rng(0).standard_normal((60, 4)), np.arange(60) % 3
    rows = np.arange(60)
    folds = {
        f: _sweep_task.FoldTask(x, y, 3, rows[rows % 2 == f], rows[rows % 2 != f], None, common)
        for f in (0, 1)
    }
    keys = [
        {"fold": f, "alpha": a, "reg": 1e-2, "bandwidth": 3.0, "kernel": "laplace"}
        for f in (0, 1)
        for a in (0.0, 1.0)
    ]
    found = _sweep_batch._run_batch(_sweep_batch.TableTask(folds), keys)
    assert [row["rows"] for row in found] == [24] * 4


@pytest.mark.parametrize("small", [0, 1])
@pytest.mark.parametrize("penalty", ["orthogonal", "joint"])
def test_a_training_step(monkeypatch, penalty, small):
    """The whole stack by kernels, and with torch's products in between."""
    _kernels(monkeypatch, small)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # knows no meta
    layers = nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)
    model = nn.Sequential(*layers).to(META)
    x, v = torch.empty(6, 5, device=META), torch.empty(2, 6, 3, device=META)
    for criterion, y in (
        (nn.CrossEntropyLoss(), torch.zeros(6, dtype=torch.int64, device=META)),
        (nn.MSELoss(), torch.zeros(6, 3, device=META)),
    ):
        loss_fn = normalign.GrokAlignLoss(
            criterion, 0.1, penalty=penalty, implementation="native", check_finite=False
        )
        loss = loss_fn(model, x, y, probe_vectors=v)
        loss.backward()
        assert all(part.is_meta for part in (loss, *loss_fn.last))
        assert all(p.grad.is_meta for p in model.parameters())
