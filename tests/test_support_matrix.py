"""Every feature of a training loop with every kind of model: right, or an error that helps.

A cell trains one step in float32 and compares its gradients with a float64 double backward on the
same probes. The table in docs/support.md is made from ``CELLS``;
``python tests/test_support_matrix.py`` writes it anew.
"""

from __future__ import annotations

import copy
import gc
import pathlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import normalign
from normalign import reference

WEIGHT = 0.3
BATCH = 8
CLASSES = 4
DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "support.md"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def make(name):
    """A small model in training mode, and the shape of one sample."""
    torch.manual_seed(1)
    if name == "MLP":
        layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES)]
        return nn.Sequential(*layers), (6,)
    if name == "CNN with BatchNorm":
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 36, CLASSES)), (3, 8, 8)
    if name == "transformer encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 16, CLASSES)), (5, 16)
    return Recurrent(), (5, 6)


MODELS = ("MLP", "CNN with BatchNorm", "transformer encoder", "LSTM")


class Case:
    """A model, a batch, probes, and the gradients by definition."""

    def __init__(self, name):
        self.name = name
        self.model, shape = make(name)
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(BATCH, *shape, generator=generator)
        self.y = torch.arange(BATCH) % CLASSES
        self.v = torch.randn(1, BATCH, CLASSES, generator=generator)
        self.loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), WEIGHT)

    def expected(self, rows=slice(None)):
        """Loss and gradients in float64, of some of the rows."""
        model = copy.deepcopy(self.model).double()
        with sdpa_kernel(SDPBackend.MATH):
            logits, penalty = reference.grokalign(
                model, self.x[rows].double(), self.v[:, rows].double()
            )
        loss = F.cross_entropy(logits, self.y[rows]) + WEIGHT * penalty
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    def loss(self, model=None, rows=slice(None)):
        model = self.model if model is None else model
        return self.loss_fn(model, self.x[rows], self.y[rows], probe_vectors=self.v[:, rows])

    def gradients(self):
        return [p.grad for p in self.model.parameters()]


def assert_close(actual, expected, tolerance=2e-5):
    """Relative to the whole gradient: single entries of it cancel.

    2e-5 is about 100 roundings of float32, for chains of some tens of products.
    """
    error = sum((a.double() - e).square().sum() for a, e in zip(actual, expected, strict=True))
    size = sum(e.square().sum() for e in expected)
    assert (error / size).sqrt() < tolerance


def eager(case):
    _, expected = case.expected()
    case.loss().backward()
    assert_close(case.gradients(), expected)


def compiled_model(case):
    _, expected = case.expected()
    compiled = torch.compile(case.model, backend="aot_eager")
    if CELLS["torch.compile of the model"][case.name] == "works":
        case.loss(compiled).backward()
        assert_close(case.gradients(), expected)
        return
    with pytest.raises(RuntimeError, match=r"torch\.compile.*_orig_mod.*compile the whole step"):
        case.loss(compiled)


def compiled_step(case):
    loss, expected = case.expected()
    # One case goes through the default backend; the others prove the same by a quicker one.
    backend = "inductor" if case.name == "MLP" else "aot_eager"
    step = torch.compile(case.loss, backend=backend, fullgraph=True)
    settings = {"allow_rnn": True} if case.name == "LSTM" else {}
    buffers = {k: v.clone() for k, v in case.model.named_buffers()}
    with torch._dynamo.config.patch(**settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from within the compiler
        actual = step()
        actual.backward()
    torch.testing.assert_close(actual.detach().double(), loss, rtol=1e-5, atol=0)
    assert_close(case.gradients(), expected)
    if buffers:  # BatchNorm is updated once, as by a plain step
        plain, _ = make(case.name)
        plain(case.x)
        torch.testing.assert_close(dict(plain.named_buffers()), dict(case.model.named_buffers()))


def autocast(case):
    loss, expected = case.expected()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = case.loss()
    actual.backward()
    assert actual.dtype is torch.float32
    assert all(p.grad.dtype is torch.float32 for p in case.model.parameters())
    assert abs(actual.item() / loss.item() - 1) < 0.02
    # bf16 rounds to 2^-8 = 0.4%, several times along the chain, twice.
    assert_close(case.gradients(), expected, 0.05)


def grad_scaler(case):
    _, expected = case.expected()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(case.loss()).backward()
    assert_close(case.gradients(), [g * 2**10 for g in expected])
    scaler.unscale_(optimizer)
    assert_close(case.gradients(), expected)
    scaler.step(optimizer)


def accumulation(case):
    halves = [case.expected(rows)[1] for rows in (slice(4), slice(4, 8))]
    for rows in (slice(4), slice(4, 8)):
        (case.loss(rows=rows) / 2).backward()
    assert_close(case.gradients(), [(a + b) / 2 for a, b in zip(*halves, strict=True)])


def clipping(case):
    _, expected = case.expected()
    norm = sum(g.square().sum() for g in expected).sqrt()
    case.loss().backward()
    found = torch.nn.utils.clip_grad_norm_(case.model.parameters(), norm.item() / 3)
    torch.testing.assert_close(found.double(), norm, rtol=2e-5, atol=0)
    assert_close(case.gradients(), [g / 3 for g in expected])


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def checkpointing(case):
    _, expected = case.expected()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        case.loss(Checkpointed(copy.deepcopy(case.model), True))
    case.loss(Checkpointed(case.model, False)).backward()
    assert_close(case.gradients(), expected)


def lbfgs(case):
    _, expected = case.expected()
    optimizer = torch.optim.LBFGS(
        case.model.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    )
    losses, first = [], []

    def closure():
        optimizer.zero_grad()
        loss = case.loss()  # on the same probes each time: a line search needs one function
        loss.backward()
        losses.append(loss.item())
        first.extend([] if first else [g.clone() for g in case.gradients()])
        return loss

    optimizer.step(closure)
    assert_close(first, expected)
    assert case.loss().item() < losses[0]


def distributed(case, results):
    """Each rank has half of the batch; BatchNorm normalises each half by itself."""
    halves = [case.expected(rows)[1] for rows in (slice(4), slice(4, 8))]
    expected = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
    for rank in range(2):
        assert_close(results[rank][case.name], expected)
    assert all(
        torch.equal(a, b) for a, b in zip(results[0][case.name], results[1][case.name], strict=True)
    )


def _rank(rank, folder):
    torch.set_num_threads(1)
    # A file as the meeting place: no server thread that one rank could take away from the other.
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    try:
        torch.save({name: _gradients(name, rank) for name in MODELS}, f"{folder}/{rank}.pt")
        gc.collect()  # no wrapped model may outlive the group: its threads would end the process
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def _gradients(name, rank):
    case = Case(name)
    wrapped = nn.parallel.DistributedDataParallel(case.model)
    case.loss(wrapped, slice(4 * rank, 4 * rank + 4)).backward()
    return case.gradients()


@pytest.fixture(scope="module")
def distributed_gradients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


FEATURES = {
    "eager": eager,
    "torch.compile of the model": compiled_model,
    "torch.compile of the whole step": compiled_step,
    "DistributedDataParallel (gloo, 2 processes)": distributed,
    "bf16 autocast": autocast,
    "GradScaler": grad_scaler,
    "gradient accumulation": accumulation,
    "gradient clipping": clipping,
    "activation checkpointing, non-reentrant": checkpointing,
    "LBFGS closure": lbfgs,
}
CELLS = {feature: dict.fromkeys(MODELS, "works") for feature in FEATURES}
CELLS["torch.compile of the model"].update(
    dict.fromkeys(MODELS[1:], "error: pass the uncompiled model, or compile the whole step")
)
CELLS["torch.compile of the whole step"]["LSTM"] = "works with `torch._dynamo.config.allow_rnn`"


def table():
    """The matrix in markdown."""
    lines = ["| | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 1) + "|"]
    lines += [
        f"| {feature} | " + " | ".join(cells[model] for model in MODELS) + " |"
        for feature, cells in CELLS.items()
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("feature", FEATURES)
def test_cell(feature, model, request):
    torch._dynamo.reset()
    case = Case(model)
    if feature.startswith("Distributed"):
        distributed(case, request.getfixturevalue("distributed_gradients"))
    else:
        FEATURES[feature](case)


def test_the_document_holds_this_table():
    assert table() in DOCUMENT.read_text(), "run: python tests/test_support_matrix.py"


if __name__ == "__main__":
    before, mark, rest = DOCUMENT.read_text().partition("| | MLP")
    _, _, after = (mark + rest).partition("\n\n")
    DOCUMENT.write_text(before + table() + "\n\n" + after)
