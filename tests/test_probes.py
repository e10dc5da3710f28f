"""The operator that draws probes in compiled graphs, and streams across processes."""

import copy
import pickle

import pytest
import torch

from normalign import _probes


@pytest.mark.parametrize("kind", _probes.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operator(kind, dtype):
    logits = torch.zeros(5, 3, dtype=dtype)
    arguments = (logits, 4, kind, _probes.DEFAULT_HANDLE)
    operator = torch.ops.normalign.draw_probes.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    v = operator(*arguments)
    assert v.shape == (4, 5, 3)
    assert v.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
    assert not torch.equal(v, operator(*arguments))


def test_two_draws_in_one_graph_differ():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def two(logits):
        return (
            torch.ops.normalign.draw_probes(logits, 1, "gaussian", 0),
            torch.ops.normalign.draw_probes(logits, 1, "gaussian", 0),
        )

    a, b = two(torch.zeros(5, 3))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("kind", _probes.KINDS)
@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_second_moment_is_the_identity(kind, outputs):
    generator = torch.Generator().manual_seed(1)
    n = 20_000
    v = _probes.draw(kind, (1, n, outputs), torch.float64, torch.device("cpu"), generator)[0]
    moment = v.T @ v / n
    # Entries have a standard error of at most sqrt(2 / n) (Gaussian, on the diagonal).
    assert (moment - torch.eye(outputs, dtype=torch.float64)).abs().max() < 5 * (2 / n) ** 0.5
    if kind != "gaussian":
        norms = v.square().sum(1)
        torch.testing.assert_close(norms, torch.full_like(norms, outputs))


def test_exact_probes_sum_to_the_identity():
    v = _probes.identity(2, 4, torch.float64, torch.device("cpu"))
    for sample in v.transpose(0, 1):
        torch.testing.assert_close(sample.T @ sample / 4, torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_streams_are_copied_with_their_state(duplicate):
    device = torch.device("cpu")
    stream = _probes.ProbeStream(7)
    torch.randn(3, generator=stream.on(device))
    other = duplicate(stream)
    assert other.handle != stream.handle
    a, b = (torch.randn(5, generator=s.on(device)) for s in (stream, other))
    assert torch.equal(a, b)


def test_unused_streams_are_forgotten():
    stream = _probes.ProbeStream(7)
    handle = stream.handle
    del stream
    assert handle not in _probes._streams
