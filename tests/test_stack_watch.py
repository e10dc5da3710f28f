"""A fused run never differs from calling the model, whatever the model's code does or becomes."""

import gc
import random
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalign
from normalign import _load

pytestmark = pytest.mark.skipif(_load._C is None, reason="needs the compiled kernels")

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
SWITCH = {"act": "relu"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def act(self, h):
        return torch.relu(h)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def sequential():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def path(model, x=X):
    return normalign.explain(model, x).name


def check(model, x=X):
    torch.testing.assert_close(normalign.grokalign(model, x)[0], model(x))


def changed(kind, change):
    """The model is right before and after, and was fused before."""
    model = kind()
    check(model)
    assert path(model) == "fused"
    before = model(X)
    change(model)
    check(model)
    assert not torch.equal(model(X), before), "the change must matter"


class TestWhatAForwardReads:
    def test_functions(self):
        class Held(Net):
            def __init__(self):
                super().__init__()
                self.act = torch.relu

        changed(Held, lambda m: setattr(m, "act", torch.tanh))
        changed(Net, lambda m: setattr(m, "act", torch.tanh))

    @pytest.mark.parametrize("holder", [dict, types.SimpleNamespace])
    def test_settings_in_a_container(self, holder):
        class Configured(Net):
            def __init__(self):
                super().__init__()
                self.config = holder(act="relu")

            def act(self, h):
                config = self.config if holder is dict else vars(self.config)
                return getattr(torch, config["act"])(h)

        def change(m):
            (m.config if holder is dict else vars(m.config))["act"] = "tanh"

        changed(Configured, change)

    def test_globals_closures_and_classes(self):
        class Global(Net):
            def act(self, h):
                return getattr(torch, SWITCH["act"])(h)

        smooth = False

        class Closure(Net):
            act_name = "relu"

            def act(self, h):
                return torch.tanh(h) if smooth else getattr(torch, self.act_name)(h)

        def become_smooth(_):
            nonlocal smooth
            smooth = not smooth

        try:
            changed(Global, lambda _: SWITCH.update(act="tanh"))
        finally:
            SWITCH["act"] = "relu"
        changed(Closure, become_smooth)
        become_smooth(None)
        changed(Closure, lambda _: setattr(Closure, "act_name", "sigmoid"))
        changed(Closure, lambda _: setattr(Closure, "forward", lambda s, x: s.b(s.a(x))))

    def test_properties_buffers_and_none(self):
        class Kinds(Net):
            def __init__(self):
                super().__init__()
                self._smooth, self.extra = False, None
                self.register_buffer("flag", torch.tensor(False))

            @property
            def smooth(self):
                return self._smooth

            def act(self, h):
                if self.extra is not None or self.flag:
                    return torch.sigmoid(h)
                return torch.tanh(h) if self.smooth else torch.relu(h)

        changed(Kinds, lambda m: setattr(m, "_smooth", True))
        changed(Kinds, lambda m: setattr(m, "extra", "anything"))
        changed(Kinds, lambda m: m.flag.fill_(True))

    def test_what_cannot_be_watched(self):
        class Opaque(Net):
            def __init__(self):
                super().__init__()
                self.steps = iter(range(9))

            def act(self, h):
                return torch.relu(h) if next(self.steps) < 2 else torch.tanh(h)

        assert "steps, a range_iterator" in normalign.explain(Opaque(), X).reason


class TestWhatAGraphDoesNotShow:
    @pytest.mark.parametrize(
        "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
    )
    def test_modes(self, mode):
        class Moded(Net):
            def forward(self, x):
                with mode():
                    h = self.a(x)
                return self.b(torch.relu(h))

        assert "gradient mode or autocast" in normalign.explain(Moded(), X).reason

    def test_random_branches(self):
        class Skips(Net):
            def act(self, h):
                return torch.relu(h) if torch.rand(1) < 0.5 and random.random() < 0.5 else h

        model = Skips()
        states = torch.get_rng_state(), random.getstate()
        assert "random" in normalign.explain(model, X).reason
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]

    @pytest.mark.parametrize("traceable", [True, False])
    def test_effects_are_undone(self, traceable):
        class Busy(Net):
            def __init__(self):
                super().__init__()
                self.calls, self.kept, self.seen = 0, [], torch.zeros(())
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.calls += 1
                self.last = self.a(x)
                self.kept.append(self.last)
                self.count += 1
                self.seen.add_(1)
                if not traceable and x.sum() > 1e9:
                    return self.last
                return self.b(torch.relu(self.last)) * torch.tensor(1.0)

        model = Busy()
        fields = set(vars(model))
        assert path(model) == "general"
        assert (model.calls, model.kept, model.count.item(), model.seen.item()) == (0, [], 0, 0)
        assert set(vars(model)) == fields

    def test_calls_that_are_not_the_classes(self):
        def twice(self, x):
            return 2 * F.linear(x, self.weight, self.bias)

        class Doubled(Net):
            def __call__(self, x):
                return 2 * super().__call__(x)

        model = sequential()
        model[0].forward = types.MethodType(twice, model[0])
        whole = sequential()
        whole.forward = lambda x: 2 * nn.Sequential.forward(whole, x)
        for m in (model, whole, Doubled()):
            assert path(m) == "general"
            check(m)

    def test_criteria_that_do_something_else(self):
        model, y = sequential(), torch.tensor([0, 1, 2, 0])
        criterion = nn.CrossEntropyLoss()
        criterion.forward = lambda z, t: 2 * F.cross_entropy(z, t)
        loss_fn = normalign.GrokAlignLoss(criterion, 0.1)
        loss_fn(model, X, y)
        torch.testing.assert_close(loss_fn.last.task_loss, 2 * F.cross_entropy(model(X), y))

    def test_a_function_of_a_known_name(self):
        def gelu(x):
            return x * torch.sigmoid(1.702 * x)

        node = torch.fx.Graph()
        node = node.call_function(gelu, (node.placeholder("x"),))
        assert normalign._stack_recognise._node_activation(node) is None


class TestParameters:
    def test_replaced_by_others(self):
        def widen(m):
            m[0].weight = nn.Parameter(torch.randn(9, 5))
            m[0].bias = nn.Parameter(torch.randn(9))
            m[2].weight = nn.Parameter(torch.randn(6, 9))
            m[2].bias = nn.Parameter(torch.randn(6))

        changed(sequential, lambda m: setattr(m[0], "bias", None))
        changed(
            lambda: nn.Sequential(nn.Linear(5, 3, bias=False)),
            lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(3))),
        )
        model = sequential()
        check(model)
        widen(model)
        check(model)
        assert path(model) == "fused"

    def test_no_parameter_or_no_width(self):
        model = sequential()
        weight = model[0].weight.detach()
        del model[0].weight
        model[0].weight = 2 * weight
        check(model)
        with pytest.warns(UserWarning, match="zero-element"):
            empty = nn.Sequential(nn.Linear(5, 0), nn.Linear(0, 2))
        check(empty)

    @pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), Net, sequential])
    def test_nothing_keeps_the_model(self, make):
        model = make()
        normalign.grokalign(model, X)
        model.__dict__["myself"] = [model]  # a cycle that the collector can resolve
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


class TestInputs:
    def test_default_device(self):
        with torch.device("meta"):
            normalign.grokalign(sequential().to_empty(device="cpu"), X)

    def test_negated_views(self):
        check(sequential(), torch._neg_view(X))

    def test_inference_tensors(self):
        with torch.inference_mode():
            x = X.clone()
        model = sequential()
        normalign.grokalign(model, x)[1].backward()
        assert model[0].weight.grad is not None

    def test_subclasses(self):
        class Named(torch.Tensor):
            pass

        assert "Named" in normalign.explain(sequential(), X.as_subclass(Named)).reason
