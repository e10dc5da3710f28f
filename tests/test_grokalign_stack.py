"""The fused stack against float64 double backward, and when it steps aside."""

import copy
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalign
from normalign import _load, _stack
from normalign.testing import instruction_set, isa_names

pytestmark = pytest.mark.skipif(_load._C is None, reason=str(_load.cpu_error))


class Square(nn.Module):
    def forward(self, x):
        return x**2


ACTIVATIONS = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "square": Square,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": lambda: nn.Softplus(2.0, 5.0),
}
PIECEWISE_LINEAR = ("identity", "relu", "leaky_relu")
# Below, at and above a vector and a panel of every instruction set; primes; a width of one.
WIDTHS = ([5, 3], [7, 33, 1], [17, 64, 16, 10], [33, 15, 97, 32, 2])
# Each layer rounds sums of up to 100 terms: some units of epsilon, relative to the norm.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def stack(widths, activation="relu", bias=True, dtype=torch.float64):
    layers = []
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(n, m, bias=bias))
        if i < len(widths) - 2:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers).to(dtype)


def double_backward(model, x, v, penalty):
    """Logits and each sample's penalty in float64, by the definition."""
    model, x, v = copy.deepcopy(model).double(), x.double().clone(), v.double()
    x.requires_grad_()
    logits = model(x)
    squares = 0
    for u in v:
        (g,) = torch.autograd.grad(logits, x, u, create_graph=True)
        if penalty == "orthogonal":
            direction = x.detach()
            norm = (direction * direction).sum(1, keepdim=True)
            along = (g * direction).sum(1, keepdim=True) / norm.where(norm > 0, 1.0)
            g = g - along * direction
        squares = squares + (g * g).sum(1) / len(v)
    if penalty == "joint":
        _, jx = torch.autograd.functional.jvp(model, x.detach(), x.detach(), create_graph=True)
        return model, logits, squares.sqrt() + ((logits - jx) ** 2).sum(1)
    return model, logits, squares


def relative(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-300)).item()


def check(model, x, v, penalty):
    planned = _stack.plan(model, x, penalty)
    assert isinstance(planned, _stack.StackPlan), planned
    logits, terms = planned.run(x, v, penalty, "none")
    exact, exact_logits, exact_terms = double_backward(model, x, v, penalty)
    target = torch.randn_like(logits)
    shares = torch.linspace(0.1, 1.0, len(x), dtype=x.dtype)  # each sample's own weight
    ((logits - target).square().mean() + (shares * terms).mean()).backward()
    ((exact_logits - target).square().mean() + (shares * exact_terms).mean()).backward()
    bound = TOLERANCE[x.dtype]
    assert relative(logits, exact_logits) < bound
    assert relative(terms, exact_terms) < bound
    grads = [p.grad for p in model.parameters()]
    wanted = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in exact.parameters()
    ]  # autograd leaves out what does not matter
    ours, theirs = (torch.cat([g.flatten().double() for g in gs]) for gs in (grads, wanted))
    assert relative(ours, theirs) < bound


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("penalty", ["orthogonal", "jacobian", "joint"])
def test_equals_double_backward(isa, dtype, activation, penalty):
    if penalty == "joint" and activation not in PIECEWISE_LINEAR:
        pytest.skip("the offset is fused for piecewise linear stacks")
    if penalty == "jacobian" and isa != isa_names()[-1]:
        pytest.skip("one instruction set is enough: orthogonal covers all that it does")
    with instruction_set(isa):
        for widths, batch, probes, bias in zip(
            WIDTHS, (1, 13, 29, 5), (1, 2, 1, 3), (True, True, False, True), strict=True
        ):
            model = stack(widths, activation, bias, dtype)
            x = torch.randn(batch, widths[0], dtype=dtype)
            check(model, x, torch.randn(probes, batch, widths[-1], dtype=dtype), penalty)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("penalty", ["orthogonal", "joint"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("widths", "batch"),
    [
        ([43, 200, 200, 2], 300),  # several blocks of rows
        ([10, 20, 2], 1300),  # several lanes of blocks
        ([700, 800, 40], 70),  # weights packed piece by piece, more columns than one piece
        ([1000, 600], 600),  # one layer, several streamed blocks
    ],
)
def test_blocks_pieces_and_threads(isa, penalty, threads, widths, batch):
    torch.set_num_threads(threads)
    model = stack(widths, "relu", True, torch.float64)
    x = torch.randn(batch, widths[0], dtype=torch.float64)
    with instruction_set(isa):
        check(model, x, torch.randn(1, batch, widths[-1], dtype=torch.float64), penalty)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("widths", [[6, 20, 3], [5, 33, 17, 40]])
def test_joint_penalty_of_squares_without_bias(isa, widths):
    """Homogeneous of degree 2 and 4: the offset is -f and -3 f."""
    model = stack(widths, "square", bias=False)
    x = torch.randn(9, widths[0], dtype=torch.float64)
    v = torch.randn(2, 9, widths[-1], dtype=torch.float64)
    with instruction_set(isa):
        check(model, x, v, "joint")
    assert "without bias" in _stack.plan(stack(widths, "square"), x, "joint")


@pytest.mark.parametrize("batch", [300, 1200])  # blocks of one and of several lanes
def test_threads_change_no_bit(batch):
    model, x = stack([43, 70, 50, 2], dtype=torch.float32), torch.randn(batch, 43)
    v = torch.randn(1, batch, 2)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        model.zero_grad()
        logits, penalty = _stack.plan(model, x, "orthogonal").run(x, v, "orthogonal", "mean")
        (logits.sum() + penalty).backward()
        results.append([logits, penalty, *(p.grad for p in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("outputs", "kind"), [(7, "ce"), (40, "ce"), (3, "mse"), (1, "mse")])
def test_criterion_in_the_same_step(dtype, outputs, kind):
    model, x = stack([9, 33, outputs], "gelu", True, dtype), torch.randn(30, 9, dtype=dtype)
    y = torch.randint(outputs, (30,)) if kind == "ce" else torch.randn(30, outputs, dtype=dtype)
    if kind == "ce":
        y[3] = -100  # ignored
    criterion = nn.CrossEntropyLoss() if kind == "ce" else nn.MSELoss()
    v = torch.randn(1, 30, outputs, dtype=dtype)
    loss_fn = normalign.GrokAlignLoss(criterion, 0.3)
    loss = loss_fn(model, x, y, probe_vectors=v)
    assert type(loss.grad_fn).__name__ == "_LossBackward"
    (3 * loss).backward()
    exact, logits, terms = double_backward(model, x, v, "orthogonal")
    task = criterion(logits, y if kind == "ce" else y.double())
    (3 * (task + 0.3 * terms.mean())).backward()
    bound = TOLERANCE[dtype]
    assert relative(loss_fn.last.task_loss, task) < bound
    assert relative(loss_fn.last.penalty, terms.mean()) < bound
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(p.grad, q.grad) < bound


def test_target_out_of_range():
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    for bad in (3, -1):
        with pytest.raises(IndexError, match=f"target must be a class from 0 to 2, got {bad}"):
            loss_fn(stack([4, 3], dtype=torch.float32), torch.randn(2, 4), torch.tensor([0, bad]))


def run(model, x, v=None, penalty="orthogonal"):
    v = torch.randn(1, x.shape[0], 3, dtype=x.dtype) if v is None else v
    return _stack.plan(model, x, penalty).run(x, v, penalty, "mean")


def test_backward_twice_and_parts_of_it():
    model, x = stack([6, 20, 3]), torch.randn(11, 6, dtype=torch.float64)
    logits, penalty = run(model, x)
    wanted = torch.autograd.grad(penalty, model.parameters(), retain_graph=True, allow_unused=True)
    for scale in (1.0, 2.0):
        again = torch.autograd.grad(
            scale * penalty, model.parameters(), retain_graph=True, allow_unused=True
        )
        for a, w in zip(again, wanted, strict=True):
            torch.testing.assert_close(a, scale * w)
    task = torch.autograd.grad(logits.square().sum(), model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), model.parameters())
    for a, w in zip(task, expected, strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("what", [0, 1])
def test_second_order_is_refused(what):
    model = stack([6, 20, 3])
    result = run(model, torch.randn(4, 6, dtype=torch.float64))[what].sum()
    (grad,) = torch.autograd.grad(result, model[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once only.*implementation=\"general\""):
        (grad.sum() + model[0].weight.sum()).backward()


def test_weights_changed_before_backward_are_noticed():
    model = stack([6, 20, 3])
    _, penalty = run(model, torch.randn(4, 6, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_frozen_parameters_get_no_gradient():
    model, x = stack([6, 20, 3]), torch.randn(4, 6, dtype=torch.float64)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    sum(run(model, x)[0].sum() for _ in range(1)).backward()
    assert [p.grad is None for p in model.parameters()] == [True, False, False, True]


def test_a_layer_used_twice_gets_both_gradients():
    shared = nn.Linear(8, 8).double()
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x, v = torch.randn(5, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    logits, penalty = run(model, x, v)
    (logits.sum() + penalty).backward()
    exact, exact_logits, terms = double_backward(model, x, v, "orthogonal")
    (exact_logits.sum() + terms.mean()).backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 1e-13


def test_zero_rows_and_dead_nets():
    model, x = stack([6, 20, 3]), torch.randn(4, 6, dtype=torch.float64)
    x[1] = 0  # nothing is projected
    check(model, x, torch.randn(1, 4, 3, dtype=torch.float64), "orthogonal")
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    for penalty in ("orthogonal", "joint"):
        _, value = run(model, x, penalty=penalty)
        value.backward()
        assert torch.isfinite(value)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_is_not_hidden(isa, activation):
    model, x = stack([20, 33, 3], activation, dtype=torch.float32), torch.randn(9, 20)
    x[4, 19] = float("nan")
    with instruction_set(isa):
        logits, penalty = _stack.plan(model, x, "orthogonal").run(
            x, torch.randn(1, 9, 3), "orthogonal", "none"
        )
    bad = torch.isnan(penalty) | torch.isnan(logits).any(1)
    assert bad.tolist() == [i == 4 for i in range(9)]


def test_large_inputs_saturate_as_in_torch():
    x = torch.tensor([[-60.0], [-20.0], [20.0], [60.0]], dtype=torch.float64)
    for activation in ACTIVATIONS:
        model = stack([1, 1, 1], activation)
        logits, _ = run(model, x, torch.ones(1, 4, 1, dtype=torch.float64))
        torch.testing.assert_close(logits, model(x), rtol=1e-12, atol=1e-12)


def test_views_and_strides():
    model = stack([6, 20, 3])
    x = torch.full((9, 10), float("nan"), dtype=torch.float64)
    x[1:8, 2:8] = torch.randn(7, 6)
    v = torch.randn(1, 1, 3, dtype=torch.float64).expand(2, 7, 3)
    for view in (x[1:8, 2:8], x[1:8, 2:8].t().contiguous().t(), x[1:2, 2:8].expand(7, 6)):
        check(model, view, v, "orthogonal")
        model.zero_grad()
    assert torch.isnan(x[0]).all()


def test_images_are_flattened():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x, v = torch.randn(5, 3, 2, 2), torch.randn(1, 5, 3)
    flat = run(model[1], x.flatten(1), v)
    assert all(torch.equal(a, b) for a, b in zip(run(model, x, v), flat, strict=True))


def test_memory_goes_back_without_the_garbage_collector():
    model, x = stack([6, 20, 3]), torch.randn(4, 6, dtype=torch.float64)
    gc.disable()
    try:
        for result in (lambda: run(model, x), lambda: run(model, x)[0].sum().backward()):
            result()
            spares = _stack.plan(model, x, "orthogonal")._fused["orthogonal"].spares
            assert len(spares) == 1
            address = spares[0].data_ptr()
            result()
            assert [t.data_ptr() for t in spares] == [address]
    finally:
        gc.enable()


def test_spare_workspaces_are_bounded():
    model, x = stack([6, 20, 3]), torch.randn(4, 6, dtype=torch.float64)
    alive = [run(model, x) for _ in range(6)]
    fused = _stack.plan(model, x, "orthogonal")._fused["orthogonal"]
    del alive
    gc.collect()
    assert 1 <= len(fused.spares) <= 2


class TestRecognition:
    x = torch.randn(4, 6)

    def reason(self, model, x=None, penalty="orthogonal"):
        found = _stack.plan(model, self.x if x is None else x, penalty)
        return None if isinstance(found, _stack.StackPlan) else found

    def test_what_is_taken(self):
        linear = nn.Linear(6, 6)
        for model in (
            linear,
            nn.Sequential(nn.Sequential(linear, nn.Identity()), nn.Dropout(0.0), nn.Tanh(), linear),
            nn.Sequential(linear, nn.Dropout(0.5), linear).eval(),
        ):
            assert self.reason(model) is None

    @pytest.mark.parametrize("form", ["x * x", "x ** 2", "torch.square(x)", "F.relu(x)", "x.relu()",
                                      "F.gelu(x, approximate='tanh')", "F.leaky_relu(x, 0.2)",
                                      "torch.tanh(x)", "F.silu(x)", "x.sigmoid()"])  # fmt: skip
    def test_functional_activations(self, form):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3)

            def forward(self, x):
                x = self.a(torch.flatten(x, 1))
                return self.b(eval(form, {"x": x, "F": F, "torch": torch}))

        model = Net().double()
        check(model, self.x.double(), torch.randn(1, 4, 3, dtype=torch.float64), "orthogonal")

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (nn.Sequential(nn.Linear(6, 6), nn.Softmax(1)), "Softmax is not a layer"),
            (nn.Sequential(nn.Linear(6, 6), nn.ReLU()), "after the last Linear"),
            (nn.Sequential(nn.ReLU(), nn.Linear(6, 6)), "before the first Linear"),
            (nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Tanh(), nn.Linear(6, 6)), "two activ"),
            (nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6)), "Dropout is active"),
            (nn.Sequential(nn.Linear(6, 6).double()), "float64 on cpu, unlike the input"),
            (nn.Sequential(nn.Linear(5, 6)), "6 features, the first Linear takes 5"),
            (nn.Sequential(), "no Linear"),
            (nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), "is not a layer"),
        ],
    )
    def test_what_is_not(self, model, words):
        assert words in self.reason(model)

    def test_input_and_penalty(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        assert "requires a gradient" in self.reason(model, self.x.clone().requires_grad_())
        assert "batch is empty" in self.reason(model, self.x[:0])
        assert "3 dimensions" in self.reason(model, torch.randn(2, 3, 6))
        assert "linear pieces" in self.reason(model, penalty="joint")
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast" in self.reason(model)

    def test_a_changed_model_is_looked_at_again(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3))
        x, v = self.x, torch.randn(1, 4, 3)
        first = run(model, x, v)[0]
        model[1].negative_slope = 0.9
        assert not torch.equal(run(model, x, v)[0], first)
        torch.testing.assert_close(run(model, x, v)[0], model(x))
        model[1] = nn.Tanh()
        torch.testing.assert_close(run(model, x, v)[0], model(x))
        handle = model[0].register_forward_hook(lambda m, i, o: 2 * o)
        assert "hooks" in self.reason(model)
        handle.remove()
        assert self.reason(model) is None
        handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
        assert "global" in self.reason(model)
        handle.remove()

    def test_a_branch_on_an_attribute_is_followed(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.smooth = nn.Linear(6, 9), nn.Linear(9, 3), False

            def forward(self, x):
                h = self.a(x)
                return self.b(torch.tanh(h) if self.smooth else torch.relu(h))

        model, v = Net(), torch.randn(1, 4, 3)
        for smooth in (False, True, False):
            model.smooth = smooth
            torch.testing.assert_close(run(model, self.x, v)[0], model(self.x))

    def test_data_dependent_models_are_left_alone(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 3)

            def forward(self, x):
                return self.a(x) if x.sum() > 0 else self.a(-x)

        assert "torch.fx cannot trace" in self.reason(Net())

    def test_skip_connections_are_left_alone(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)

            def forward(self, x):
                return x + self.a(x)

        assert self.reason(Net()) is not None


def test_joint_penalty_of_tiny_jacobians():
    """The squares of a Jacobian of 1e-24 are 0 in float32; its norm and gradient are not."""
    model, x = stack([6, 9, 9, 9, 3], bias=False, dtype=torch.float32), torch.randn(5, 6)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-6)
    check(model, x, torch.randn(2, 5, 3), "joint")


@pytest.mark.skipif(len(isa_names()) < 2, reason="one instruction set")
def test_a_step_keeps_its_instruction_set():
    model, x = stack([6, 20, 3], dtype=torch.float32), torch.randn(7, 6)
    v = torch.randn(1, 7, 3)
    grads = []
    for second in isa_names():
        with instruction_set(isa_names()[-1]):
            _, penalty = run(model, x, v)
        with instruction_set(second):
            grads.append(torch.autograd.grad(penalty, model[0].weight)[0])
    assert all(torch.equal(g, grads[0]) for g in grads)


def test_hooks_of_a_compiled_wrapper_are_seen():
    model = torch.compile(stack([6, 20, 3], dtype=torch.float32), backend="eager")
    model.register_forward_hook(lambda m, i, o: 2 * o)
    assert "hooks" in normalign.explain(model, torch.randn(4, 6)).reason
