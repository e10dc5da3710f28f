import contextlib

import pytest
import torch
from torch import nn

import normalign
from normalign import _probes
from normalign.graph import GraphStep

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ((), {}, ValueError, "graph_step needs the step's inputs, got none"),
        ((1.0,), {}, TypeError, r"input 0 must be a torch.Tensor, got float"),
        (
            (torch.zeros(1),),
            {},
            ValueError,
            "inputs must be on one CUDA device, got input 0 on cpu",
        ),
        ((torch.zeros(1),), {"warmup": 0}, ValueError, "warmup must be an integer of at least 1"),
    ],
)
def test_bad_input(inputs, options, error, message):
    with pytest.raises(error, match=message):
        normalign.graph_step(lambda *t: None, *inputs, **options)


class _Recorded:
    """Stands for a captured graph: a replay runs the step on the captured inputs."""

    def __init__(self):
        self.generators = []
        self.replay = None

    def register_generator_state(self, generator):
        self.generators.append(generator)


def test_a_call_copies_the_inputs_and_replays():
    own, out = torch.zeros(2), torch.zeros(2)
    graph = _Recorded()
    graph.replay = lambda: out.copy_(2 * own)
    step = GraphStep(graph, [own], out)
    given = torch.tensor([1.0, 3.0])
    assert step(given) is out
    assert torch.equal(out, 2 * given)
    with pytest.raises(ValueError, match="takes 1 inputs, got 2"):
        step(own, own)
    with pytest.raises(ValueError, match=r"input 0 must have shape \(2,\).*got \(3,\)"):
        step(torch.zeros(3))
    with pytest.raises(ValueError, match="float64"):
        step(torch.zeros(2).double())


def test_capture_warms_up_and_registers_the_streams(monkeypatch):
    """The order of things, with torch's CUDA interface replaced: no GPU is needed for that."""
    graph, calls = _Recorded(), []

    class Stream:
        def wait_stream(self, other):
            calls.append("wait")

    @contextlib.contextmanager
    def capture(into):
        assert into is graph
        assert graph.generators, "generators must be registered before the capture"
        calls.append("capture")
        yield

    monkeypatch.setattr("normalign.graph._device", lambda inputs: inputs[0].device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    stream = _probes.ProbeStream(0)
    generator = torch.Generator()

    def step(x):
        calls.append("step")
        stream.on(torch.device("cpu"))
        return x + 1

    x = torch.zeros(2)
    run = normalign.graph_step(step, x, warmup=2, generators=[generator])
    assert calls == ["wait", "step", "step", "wait", "capture", "step"]
    assert stream.on(torch.device("cpu")) in graph.generators
    assert generator in graph.generators
    assert run.inputs[0] is not x


@needs_gpu
def test_replays_train_as_eager_steps_do():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
        loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight=0.1, seed=1)

        def step(x, y):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    x = torch.randn(64, 20, device="cuda")
    y = torch.randint(3, (64,), device="cuda")
    eager, step = make()
    for _ in range(8):
        step(x, y)
    captured, step = make()
    run = normalign.graph_step(step, x, y, warmup=3)  # the capture itself runs nothing
    for _ in range(5):
        run(x, y)
    torch.cuda.synchronize()
    for a, b in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
