"""The published protocol of a table on a GPU: its launches are counted, its figures compared."""

import dataclasses

import numpy as np
import paper_rfam
import pytest
import rfam_protocol
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normalign import _load, _rfam_batch, _rfam_cuda
from normalign._pgd import PUBLISHED
from normalign.testing import gpu_devices, on_gpu

SETTINGS = {
    "regs": paper_rfam.REGS,
    "bandwidth": paper_rfam.BANDWIDTH,
    "iterations": paper_rfam.ITERATIONS,
    "eps": paper_rfam.EPS,
}
# The published attack with fewer steps, which are all in one launch: the host machine is slow.
ATTACK = dataclasses.replace(PUBLISHED, steps=2)
FREE = {"_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


@pytest.fixture(params=gpu_devices())
def device(request):
    with on_gpu(request.param) as device:
        yield device


class DeviceOperators(TorchDispatchMode):
    """Counts torch's operators on tensors that would be on the GPU, and copies to and from it.

    A tensor is there when it was uploaded or was made from one that is. Views and allocations start
    nothing. What an operator of one kernel here starts on a GPU is one kernel; those that aren't
    (factorisations) are listed, so that a test can see that there are none.
    """

    def __init__(self):
        super().__init__()
        self.storages = {}  # kept, so that no address is used again
        self.counts = {}
        self.uploads = 0

    def mark(self, *tensors):
        for t in tensors:
            storage = t.untyped_storage()
            self.storages[storage._cdata] = storage

    def upload(self, tensor):
        self.uploads += 1
        self.mark(tensor)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(t.untyped_storage()._cdata in self.storages for t in inputs):
            return result
        self.mark(*(t for t in tree_leaves(result) if isinstance(t, torch.Tensor)))
        name = func.overloadpacket.__name__
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        view = bool(aliases) and not any(alias.is_write for alias in aliases)
        if not view and name not in FREE:
            self.counts[name] = self.counts.get(name, 0) + 1
        return result


def _protocol(table, device, alphas=(0.0, 1.0)):
    return rfam_protocol.run(table, alphas, ATTACK, device, **SETTINGS)


# More points than a tile has, so that sums have several parts, as those of larger tables have.
TABLE = rfam_protocol.random_table(132, 5, 3)


def _counted(table, monkeypatch, alphas=(0.0, 1.0)):
    """Our own launches, and the counter with everything else."""
    upload, counter = _rfam_batch.Tables.upload, DeviceOperators()
    before = _load._emu.launches()
    with monkeypatch.context() as patch:
        patch.setattr(_rfam_batch.Tables, "upload", lambda s, a: counter.upload(upload(s, a)))
        with counter:
            _protocol(table, torch.device("cpu"), alphas)
    return _load._emu.launches() - before, counter


def _losing_rank():
    """A constant column and a copy of another: with alpha = 1 the first update gives them up."""
    table = rfam_protocol.random_table(132, 7, 3)
    table.X[:, 5], table.X[:, 6] = 0.5, table.X[:, 0]
    return table


@pytest.mark.parametrize("table", [TABLE, _losing_rank()], ids=["full rank", "losing rank"])
def test_launches_of_a_table(device, monkeypatch, table):
    """Search over 5 reg and 2 alphas, 8 solves of folds, 24 attacks: well under 200 launches."""
    if device.type != "cpu":
        pytest.skip("the host machine counts launches; bench/device_check.py does so on a GPU")
    ranks, first_factors = [], _rfam_batch.Tables.first_factors

    def watched(tables, problems):
        found = first_factors(tables, problems)
        ranks.append((found[1].tolist(), found[1]))
        return found

    monkeypatch.setattr(_rfam_batch.Tables, "first_factors", watched)
    ours, counter = _counted(table, monkeypatch)
    ((before, after),) = ranks
    assert before == [5] * 5 + [table.X.shape[1]] * 5
    assert after.tolist() == [5] * 10
    torch_operators = sum(counter.counts.values())
    # 5 iterations: points, K, solve, validation points and outputs; 4 updates: gradients, factor.
    # Folds: points, K, solve, test points and outputs, attack.
    assert ours == 5 * 5 + 4 * 2 + 6
    # Nothing here is more than one kernel on a GPU.
    assert set(counter.counts) <= {
        "argmax", "bmm", "clamp_", "clone", "div", "eq", "index", "linalg_vector_norm", "mul_",
        "stack", "sum",
    }  # fmt: skip
    assert torch_operators <= 51
    assert counter.uploads <= 26
    # The host reads jitters and scores of the search, the jitters of the folds, outputs at the test
    # points, and the attack's outputs and zero gradients.
    downloads = 2 + 1 + 1 + 2
    assert ours + torch_operators + counter.uploads + downloads <= 122


def test_the_search_waits_for_nothing(device, monkeypatch):
    """Between the first update and the last solve the host reads no tensor, and sends none."""
    order = []

    def noted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (order.append(name), function(*a, **k))[1])

    noted(_rfam_batch, "_updated")
    noted(_rfam_batch._Systems, "report")
    noted(_rfam_batch.Tables, "upload")
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        noted(torch.Tensor, name)
    _protocol(_losing_rank(), device)
    search = order[order.index("_updated") : order.index("report") + 2]
    assert search == ["_updated"] * 4 + ["report", "tolist"]


def test_launches_do_not_grow(device, monkeypatch):
    """Three alphas take as many as one."""
    if device.type != "cpu":
        pytest.skip("the host machine counts launches")
    table = rfam_protocol.random_table(132, 5, 2)
    counts = []
    for alphas in ((0.0,), (0.0, 0.3, 1.0)):
        ours, counter = _counted(table, monkeypatch, alphas)
        counts.append((ours, sum(counter.counts.values())))
    assert counts[0][0] == counts[1][0]
    # With more problems sums need no second part to fill the GPU.
    assert counts[1][1] <= counts[0][1]


def test_same_choice_and_figures_as_on_the_cpu(device):
    found = _protocol(TABLE, device)
    X, y = torch.from_numpy(TABLE.X).float(), torch.from_numpy(TABLE.y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMALIGN_IMPL", "reference")
        for alpha, outcome in zip((0.0, 1.0), found, strict=True):
            best, factor = paper_rfam.search(TABLE, X, y, alpha)
            assert outcome.valid_acc == best["valid_acc"]
            assert outcome.reg == best["reg"]
            assert outcome.iteration == best["iteration"]
            want = paper_rfam.fold_figures(TABLE, X, y, 1, factor, best["reg"], ATTACK)
            own = outcome.folds[1]
            assert own.clean_accuracy == want["test_acc"]
            # A point on the border may fall to either side.
            one = 1.5 / len(TABLE.folds[1][1])
            for i, eps in enumerate(paper_rfam.EPS):
                assert own.accuracy_at_result[i] == pytest.approx(
                    want[f"robust_acc_{eps}"], abs=one
                )


def test_the_counter_counts():
    """Views, allocations and host tensors are free; everything else on the device is not."""
    counter = DeviceOperators()
    with counter:
        x = counter.upload(torch.ones(4, 3))
        host = torch.ones(3, 2) * 2
        x.T.unsqueeze(0)
        x.new_empty(5)
        y = x @ counter.upload(host)
        y.add_(1)
        torch.cat((y, y)).sum(0)
    assert counter.counts == {"mm": 1, "add_": 1, "cat": 1, "sum": 1}
    assert counter.uploads == 2


def test_a_copy_of_every_row(device):
    """Copies with a ridge: no jitter, no gradient between copies, finite features."""
    table = rfam_protocol.random_table(40, 3, 2)
    table.X[20:] = table.X[:20]
    table.y[20:] = table.y[:20]
    for outcome in _protocol(table, device, alphas=(0.0,)):
        assert np.isfinite(outcome.valid_acc)
        assert all(0.0 <= fold.clean_accuracy <= 1.0 for fold in outcome.folds)
    x = torch.from_numpy(table.X)[None].to(device)
    factor = torch.eye(3, dtype=torch.float64, device=device)[None]
    u = _rfam_cuda.project_batch(x, factor, torch.zeros(1, dtype=torch.int32, device=device))
    w = _rfam_cuda.gram(u, u, 1.0, 1.0, weights=True)[0]
    assert not w[torch.arange(20), torch.arange(20, 40)].any()
