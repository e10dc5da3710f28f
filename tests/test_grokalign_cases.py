"""Situations in which regularisers of the Jacobian are known to break."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import normalign
from normalign import reference
from normalign.testing import LAYOUTS

PENALTIES = ("orthogonal", "jacobian", "joint")
IMPLEMENTATIONS = ("native", "general", "reference")


def relu_net(inputs=5, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def backend_flags():
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_attention_on_the_cpu(penalty):
    """The fused attention that torch picks by default has no second derivative."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    x, v = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(1, 3, 32, dtype=torch.float64)
    flags = backend_flags()
    logits, value = normalign.grokalign(model, x, penalty=penalty, probe_vectors=v)
    assert backend_flags() == flags
    (logits.square().mean() + value).backward()
    assert backend_flags() == flags
    other = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):
        exact_logits, exact = reference.grokalign(other, x, v, penalty)
    expected = gradients(other, exact_logits.square().mean() + exact)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def test_attention_flags_return_after_a_failed_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    weight = torch.ones(3, requires_grad=True)

    def model(x):
        return x * 2 + Fails.apply(weight)

    flags = backend_flags()
    logits, _ = normalign.grokalign(model, torch.randn(2, 3), penalty="jacobian")
    with pytest.raises(ValueError, match="on purpose"):
        logits.sum().backward()
    assert backend_flags() == flags


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of compiled functions
@pytest.mark.parametrize("how", ["in place", "a part", "a function"])
def test_every_kind_of_compiled_model_is_found(how):
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4))
    forward = None
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "a part":
        model[1] = torch.compile(model[1], backend="aot_eager")
    else:
        tanh = torch.compile(torch.tanh, backend="aot_eager")

        def forward(model, x):
            return model(tanh(x * 1))

    with pytest.raises(RuntimeError, match=r"torch\.compile"):
        normalign.grokalign(model, torch.randn(2, 2, 5), forward=forward)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_value_without_gradients(mode, implementation, penalty):
    model, x, v = relu_net(), torch.randn(4, 5), torch.randn(2, 4, 3)
    options = {"penalty": penalty, "implementation": implementation, "probe_vectors": v}
    expected = normalign.grokalign(model, x, **options)
    with mode():
        logits, value = normalign.grokalign(model, x, **options)
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        made_here = normalign.grokalign(model, x.clone(), **options)
    assert not logits.requires_grad
    assert not value.requires_grad
    torch.testing.assert_close((logits, value), expected)
    torch.testing.assert_close(made_here, expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("penalty", PENALTIES)
def test_batch_norm_is_updated_once(penalty):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    plain, x = copy.deepcopy(model), torch.randn(9, 5)
    _, value = normalign.grokalign(model, x, penalty=penalty, num_probes=2)
    value.backward()
    plain(x)
    assert model[1].num_batches_tracked == 1
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_dead_network(implementation, penalty):
    model, x = relu_net(), torch.randn(4, 5)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].bias.zero_()
    _, value = normalign.grokalign(model, x, penalty=penalty, implementation=implementation)
    assert value.item() == 0.0
    for g in gradients(model, value):
        assert g is None or torch.equal(g, torch.zeros_like(g))


# At 1e-9 the squares are below float32, but the norm in the joint penalty is not.
@pytest.mark.parametrize(
    ("penalty", "implementation", "size"),
    [(p, i, 1e-6) for p in PENALTIES for i in IMPLEMENTATIONS]
    + [("joint", "native", 1e-10), ("joint", "general", 1e-10)],
)
def test_tiny_weights_still_get_a_gradient(penalty, implementation, size):
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.LeakyReLU(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size / p.abs().max())
    x, v = torch.randn(4, 5), torch.randn(1, 4, 3)
    _, value = normalign.grokalign(
        model, x, penalty=penalty, implementation=implementation, probe_vectors=v
    )
    _, exact = reference.grokalign(copy.deepcopy(model).double(), x.double(), v.double(), penalty)
    assert value.item() > 0
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=0)
    exact_model = copy.deepcopy(model).double()
    _, exact = reference.grokalign(exact_model, x.double(), v.double(), penalty)
    for g, e in zip(gradients(model, value), gradients(exact_model, exact), strict=True):
        assert g.abs().max() > 0
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-4 * e.abs().max().item())


@pytest.mark.parametrize("probes", ["gaussian", "rademacher", "sphere"])
def test_the_estimate_is_unbiased(probes):
    """10,000 probes of a linear network lie within their own confidence interval."""
    model = nn.Linear(6, 4, bias=False).double()
    x = torch.randn(1, 6, dtype=torch.float64).expand(10_000, 6)  # a probe per sample
    truth = {"jacobian": model.weight.square().sum().item()}
    weight, unit = model.weight.detach(), x[0] / x[0].norm()
    truth["orthogonal"] = (weight - (weight @ unit)[:, None] * unit).square().sum().item()
    for penalty, expected in truth.items():
        _, values = normalign.grokalign(model, x, penalty=penalty, probes=probes, reduction="none")
        values = values.detach()
        standard_error = values.std() / 100
        assert (values.mean() - expected).abs() < 4 * standard_error
        _, exact = normalign.grokalign(model, x[:3], penalty=penalty, exact=True)
        assert abs(exact.item() / expected - 1) < 1e-6


def test_probe_kinds():
    model = nn.Identity()
    x = torch.randn(50, 7)

    def drawn(probes):
        # With J = I the product is the probe itself, and its square the value.
        return normalign.grokalign(model, x, penalty="jacobian", probes=probes, reduction="none")[1]

    torch.testing.assert_close(drawn("rademacher"), torch.full((50,), 7.0))
    torch.testing.assert_close(drawn("sphere"), torch.full((50,), 7.0))
    assert drawn("gaussian").std() > 1


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
@pytest.mark.parametrize("leaf", [False, True])
def test_in_place_first_layer(first, leaf):
    model = nn.Sequential(first, nn.Linear(5, 3))
    x = torch.randn(4, 5, requires_grad=leaf)
    before = x.detach().clone()
    logits, value = normalign.grokalign(model, x)
    (logits.sum() + value).backward()
    assert torch.equal(x.detach(), before)
    assert x.requires_grad == leaf
    assert (x.grad is not None) == leaf
    # The projection uses the caller's x, not what the layer made of it.
    if isinstance(first, nn.ReLU):
        clean = nn.Sequential(nn.ReLU(), model[1])
        v = torch.randn(1, 4, 3)
        torch.testing.assert_close(
            normalign.grokalign(model, x, probe_vectors=v)[1],
            normalign.grokalign(clean, x, probe_vectors=v, implementation="reference")[1],
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_contiguous(implementation, layout):
    model = relu_net(7)
    x, v = LAYOUTS[layout](torch.randn(6, 7)), torch.randn(1, 6, 3)
    v = LAYOUTS[layout](v[0]).unsqueeze(0)
    results = []
    for a, probes in ((x, v), (x.contiguous(), v.contiguous())):
        logits, value = normalign.grokalign(
            model, a, probe_vectors=probes, implementation=implementation
        )
        results.append((logits, value, gradients(model, logits.sum() + value)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("penalty", PENALTIES)
def test_under_a_transform_of_torch_func(penalty):
    """grad over functional_call, as in per-parameter or meta-learning code."""
    model, x, v = relu_net().double(), torch.randn(4, 5).double(), torch.randn(1, 4, 3).double()

    def loss(parameters):
        call = lambda a: torch.func.functional_call(model, parameters, (a,))  # noqa: E731
        logits, value = normalign.grokalign(call, x, probe_vectors=v, penalty=penalty)
        return logits.square().mean() + value

    found = torch.func.grad(loss)(dict(model.named_parameters()))
    logits, value = reference.grokalign(model, x, v, penalty)
    expected = gradients(model, logits.square().mean() + value)
    for g, e in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(g, e)


def test_compiled_together_with_a_transform_of_torch_func():
    """A whole step as a pure function of the parameters, as one graph."""
    torch._dynamo.reset()
    model, x, v = relu_net(), torch.randn(4, 5), torch.randn(1, 4, 3)

    def loss(parameters, x, v):
        call = lambda a: torch.func.functional_call(model, parameters, (a,))  # noqa: E731
        logits, value = normalign.grokalign(call, x, probe_vectors=v)
        return logits.square().mean() + value

    step = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)
    found = step(dict(model.named_parameters()), x, v)
    logits, value = reference.grokalign(model, x, v)
    expected = gradients(model, logits.square().mean() + value)
    for g, e in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(g, e)
