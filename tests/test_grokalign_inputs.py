"""Bad input is refused before the model runs; paths and their reasons are visible."""

import pytest
import torch
from torch import nn

import normalign
from normalign import _dispatch, _load
from normalign.testing import hide_native


class Watched(nn.Module):
    """Counts its calls with tensors; torch.fx calls it too, to see what it is made of."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.calls = 0

    def forward(self, x):
        self.calls += isinstance(x, torch.Tensor)
        return self.layer(x)


X = torch.randn(4, 5)
BAD = {
    "not a tensor": ([[1.0]], {}, TypeError, "x must be a torch.Tensor, got list"),
    "tokens": (X.long(), {}, TypeError, r"got torch.int64.*token embeddings.*forward="),
    "complex": (X.to(torch.complex64), {}, TypeError, "floating-point dtype, got torch.complex64"),
    "no batch": (X[0], {}, ValueError, r"x must have shape \(batch, ...\).*got \(5,\)"),
    "empty": (X[:0], {}, ValueError, r"at least one sample, got \(0, 5\)"),
    "sparse": (X.to_sparse(), {}, TypeError, "x must be dense"),
    "dtype": (X.double(), {}, ValueError, "x is torch.float64 on cpu, got no parameter like that"),
    "device": (X.to("meta"), {}, ValueError, "x is torch.float32 on meta.*float32 on cpu"),
    "nan": (X.clone().fill_(float("nan")), {}, ValueError, "x must be finite, got 20 entries"),
    "inf": (X / 0, {}, ValueError, "x must be finite"),
    "penalty": (X, {"penalty": "l2"}, ValueError, "penalty must be one of orthogonal, jacobian"),
    "probes": (X, {"probes": "cauchy"}, ValueError, "probes must be one of gaussian, rademacher"),
    "reduction": (X, {"reduction": "sum"}, ValueError, "reduction must be one of mean, none"),
    "implementation": (X, {"implementation": "fast"}, ValueError, "implementation must be one of"),
    "zero probes": (
        X,
        {"num_probes": 0},
        ValueError,
        "num_probes must be an integer of at least 1",
    ),
    "fraction": (X, {"num_probes": 1.0}, ValueError, "num_probes must be an integer"),
    "exact": (X, {"exact": True, "num_probes": 2}, ValueError, "num_probes must be 1 with exact"),
    "exact vectors": (
        X,
        {"exact": True, "probe_vectors": torch.zeros(1, 4, 3)},
        ValueError,
        "probe_vectors must be None with exact=True",
    ),
    "native": (X, {"implementation": "native"}, RuntimeError, "the fused stack was asked for, but"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_the_model_runs(case):
    x, options, error, message = BAD[case]
    model = Watched(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)))
    grad_mode, state = torch.is_grad_enabled(), torch.get_rng_state()
    with pytest.raises(error, match=message):
        normalign.grokalign(model, x, **options)
    assert model.calls == 0
    assert model.training
    assert torch.is_grad_enabled() == grad_mode
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(x, torch.Tensor):
        assert not x.requires_grad


@pytest.mark.parametrize("implementation", ["native", "general", "reference"])
@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        (torch.zeros(1, 4, 2), ValueError, r"probe_vectors must have shape \(any, 4, 3\)"),
        (torch.zeros(4, 3), ValueError, r"probe_vectors must have shape .* got \(4, 3\)"),
        (torch.zeros(0, 4, 3), ValueError, "at least one probe, got 0"),
        (torch.zeros(1, 4, 3, device="meta"), ValueError, "on the device of the logits, cpu"),
        (torch.zeros(1, 4, 3).long(), TypeError, "floating-point dtype, got torch.int64"),
    ],
)
def test_bad_probe_vectors(implementation, vectors, error, message):
    with pytest.raises(error, match=message):
        normalign.grokalign(
            nn.Linear(5, 3), X, probe_vectors=vectors, implementation=implementation
        )


def test_probe_vectors_of_another_dtype_are_converted():
    model, v = nn.Linear(5, 3), torch.randn(2, 4, 3)
    for implementation in ("native", "general", "reference"):
        options = {"implementation": implementation, "penalty": "joint"}
        torch.testing.assert_close(
            normalign.grokalign(model, X, probe_vectors=v.double(), **options),
            normalign.grokalign(model, X, probe_vectors=v, **options),
        )


@pytest.mark.parametrize(
    "model",
    [lambda x: x.detach() * 2, lambda x: x.argmax(1, keepdim=True), lambda x: torch.ones(4, 2)],
)
def test_no_gradient_path(model):
    with pytest.raises(ValueError, match="no gradient path to x"):
        normalign.grokalign(model, X)


def test_logits_that_need_parameters_only():
    weight = torch.ones(4, 2, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient path to x"):
        normalign.grokalign(lambda x: weight * 2, X)


def test_bad_outputs():
    with pytest.raises(ValueError, match="logits must have the batch of x, 4, as first"):
        normalign.grokalign(lambda x: x.sum(0), X)
    with pytest.raises(TypeError, match="must return a tensor of logits, got dict; choose one"):
        normalign.grokalign(lambda x: {"logits": x}, X)
    with pytest.raises(ValueError, match=r"output='logit' is not in .*\['logits'\]"):
        normalign.grokalign(lambda x: {"logits": x}, X, output="logit")


def test_missing_second_derivative():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    weight = torch.ones(5, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*once_differentiable"):
        normalign.grokalign(lambda x: Once.apply(x * weight).tanh(), X)
    with torch.no_grad():  # one derivative is enough here
        _, value = normalign.grokalign(lambda x: Once.apply(x), X, penalty="jacobian", exact=True)
    torch.testing.assert_close(value, torch.tensor(20.0))


def test_cudnn_recipe():
    """The message; a CPU has no cuDNN to meet it with."""
    from normalign import _diagnose

    class Node:
        def __init__(self, name, *parents):
            self.name = lambda: name
            self.next_functions = tuple((p, 0) for p in parents)

    class Gradient:
        grad_fn = Node("torch::autograd::NotImplemented", Node("CudnnRnnBackward0"))

    with pytest.raises(RuntimeError, match=r"torch.backends.cudnn.flags\(enabled=False\)"):
        _diagnose.check_graph(nn.Linear(1, 1), Gradient(), X)


def test_large_finite_values_are_not_taken_for_infinite():
    x = torch.full((4, 5), 2e38)  # their sum overflows
    normalign.grokalign(nn.Linear(5, 3), x, penalty="jacobian")


def test_the_finite_check_can_be_left_out():
    _, value = normalign.grokalign(nn.Linear(5, 3), X / 0, check_finite=False)
    assert torch.isnan(value)


def test_nan_weights_are_not_hidden():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    for implementation in ("native", "general", "reference"):
        for penalty in ("orthogonal", "jacobian", "joint"):
            logits, value = normalign.grokalign(
                model, X, penalty=penalty, implementation=implementation
            )
            assert torch.isnan(logits).all()
            assert torch.isnan(value)


def test_forward_may_convert():
    """The way out that the error about dtypes names."""
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
    normalign.grokalign(model, X.double(), forward=lambda m, x: m(x.float()))


def test_explain():
    stack = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    other = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
    assert normalign.explain(stack, X, num_probes=3).name == "fused"
    path = normalign.explain(other, X)
    assert path.name == "general"
    assert str(path) == "general: LayerNorm is not a layer of a fused stack"
    assert normalign.explain(stack, X, implementation="general").name == "general"
    assert normalign.explain(stack, X, implementation="reference").name == "reference"
    reasons = {
        "forward= or output=": {"forward": lambda m, x: m(x)},
        "float16": {},
    }
    assert (
        "forward= or output="
        in normalign.explain(stack, X, **reasons["forward= or output="]).reason
    )
    assert "float16" in normalign.explain(stack.half(), X.half()).reason
    assert "requires a gradient" in normalign.explain(stack, X.clone().requires_grad_()).reason
    parallel = nn.DataParallel(stack.float())
    assert normalign.explain(parallel, X).reason == "DataParallel has to see the forward pass"
    assert "no nn.Module" in normalign.explain(lambda x: x, X).reason
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in normalign.explain(stack, X).reason
    with pytest.raises(RuntimeError, match="LayerNorm is not a layer"):
        normalign.explain(other, X, implementation="native")
    with pytest.raises(TypeError, match="unknown option"):
        normalign.explain(other, X, probe="gaussian")


def test_paths_follow_the_environment(monkeypatch):
    stack = nn.Linear(5, 3)
    monkeypatch.setenv("NORMALIGN_IMPL", "reference")
    assert normalign.explain(stack, X).name == "reference"
    assert _dispatch.implementation() == "reference"
    monkeypatch.setenv("NORMALIGN_IMPL", "native")
    assert normalign.explain(stack, X).name == "fused"
    conv = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
    normalign.grokalign(conv, X)  # the projection in it is native


@pytest.mark.skipif(_load._C is None, reason=str(_load.cpu_error))
def test_without_the_extension():
    stack, v = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(1, 4, 3)
    expected = normalign.grokalign(stack, X, probe_vectors=v)
    with hide_native():
        assert normalign.explain(stack, X).reason == "normalign._C is hidden"
        torch.testing.assert_close(normalign.grokalign(stack, X, probe_vectors=v), expected)
        with pytest.raises(RuntimeError, match=r"asked for, but normalign\._C is hidden"):
            normalign.grokalign(stack, X, implementation="native")


def test_the_fused_stack_differentiates_once():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    logits, value = normalign.grokalign(model, X, implementation="native")
    (g,) = torch.autograd.grad(value + logits.sum(), model[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated once only.*implementation"):
        g.sum().backward()
    logits, value = normalign.grokalign(model, X, implementation="general")
    (g,) = torch.autograd.grad(value + logits.sum(), model[0].weight, create_graph=True)
    g.sum().backward()
    assert model[0].weight.grad is not None
