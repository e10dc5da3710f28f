"""GrokAlignLoss: the sum it computes, its probe stream, and what it leaves alone."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalign


def make():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.randn(20, 6), torch.arange(20) % 3


def train(model, x, y, loss, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(
    ("criterion", "classes"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1), True),
        (nn.MSELoss(), False),
        (lambda z, y: (z - y).abs().mean(), False),
    ],
)
@pytest.mark.parametrize("penalty", ["orthogonal", "joint"])
def test_sum_of_criterion_and_penalty(criterion, classes, penalty, general):
    model, x, y = make()
    y = y if classes else F.one_hot(y, 3).float()
    v = torch.randn(2, 20, 3)
    options = {"penalty": penalty, "implementation": "general" if general else "auto"}
    loss_fn = normalign.GrokAlignLoss(criterion, 0.7, **options)
    assert loss_fn.last is None
    total = loss_fn(model, x, y, probe_vectors=v)
    logits, value = normalign.grokalign(
        model, x, penalty=penalty, probe_vectors=v, implementation="reference"
    )
    task = criterion(logits, y)
    torch.testing.assert_close(total, task + 0.7 * value)
    torch.testing.assert_close(tuple(loss_fn.last), (logits, task, value), check_stride=False)
    assert not any(part.requires_grad for part in loss_fn.last)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(model.parameters())),
        torch.autograd.grad(task + 0.7 * value, list(model.parameters())),
        rtol=1e-4,
        atol=1e-6,
    )


def test_weight_zero_is_training_without_a_penalty():
    plain = make()
    expected = train(*plain, lambda m, x, y: F.cross_entropy(m(x), y))
    model, x, y = make()
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0)
    found = train(model, x, y, loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert loss_fn.last.penalty is None
    # Tokens have no gradient, and need none here.
    embedding = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    loss_fn(embedding, torch.randint(5, (20, 2)), y).backward()


@pytest.mark.parametrize("probes", ["gaussian", "rademacher", "sphere"])
def test_the_global_random_state_is_untouched(probes):
    model, x, y = make()
    state = torch.get_rng_state()
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1, probes=probes)
    loss_fn(model, x, y).backward()
    normalign.grokalign(model, x, probes=probes)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_stream_is_saved_and_restored_exactly():
    model, x, y = make()
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    train(model, x, y, loss_fn, steps=3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "loss": loss_fn.state_dict()}, file)
    expected = [loss_fn(model, x, y).item() for _ in range(3)]

    file.seek(0)
    saved = torch.load(file)  # weights only: plain values and tensors
    torch.manual_seed(99)
    other = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    other_model, _, _ = make()
    other_model.load_state_dict(saved["model"])
    other.load_state_dict(saved["loss"])
    assert [other(other_model, x, y).item() for _ in range(3)] == expected


def test_copies_continue_the_stream_independently():
    model, x, y = make()
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    loss_fn(model, x, y)
    other = copy.deepcopy(loss_fn)
    expected = [loss_fn(model, x, y).item() for _ in range(3)]
    assert [other(model, x, y).item() for _ in range(3)] == expected


def test_seeds():
    model, x, y = make()

    def value(**options):
        return normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 1.0, **options)(model, x, y).item()

    assert value(seed=1) == value(seed=1) != value(seed=2)
    torch.manual_seed(5)
    first = value()
    torch.randn(3)  # the stream follows the seed, not the state, of the global generator
    assert value() == first
    torch.manual_seed(6)
    assert value() != first
    generator = torch.Generator().manual_seed(7)
    a = value(generator=generator)
    assert value(generator=generator) != a
    generator.manual_seed(7)
    assert value(generator=generator) == a


def test_default_stream_of_grokalign():
    model, x, _ = make()

    def value(**options):
        return normalign.grokalign(model, x, **options)[1].item()

    torch.manual_seed(5)
    first = value()
    assert value() != first
    torch.manual_seed(6)
    assert value() != first
    torch.manual_seed(5)
    assert value() == first


def test_the_model_is_no_part_of_it():
    model, x, y = make()
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(weight=torch.ones(3)), 0.1)
    loss_fn(model, x, y)
    assert not list(loss_fn.parameters())
    assert set(loss_fn.state_dict()) == {"criterion.weight", "_extra_state"}
    assert "weight=0.1" in repr(loss_fn)


def test_weight_may_change():
    model, x, y = make()
    v = torch.randn(1, 20, 3)
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    one = loss_fn(model, x, y, probe_vectors=v)
    loss_fn.weight = 0.2
    two = loss_fn(model, x, y, probe_vectors=v)
    torch.testing.assert_close(two - one, 0.1 * loss_fn.last.penalty)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_bad_weight(weight):
    with pytest.raises(ValueError, match="weight must be finite and at least 0, got"):
        normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight)
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    with pytest.raises(ValueError, match="weight must be"):
        loss_fn.weight = weight
    assert loss_fn.weight == 0.1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_probes": 0}, ValueError, "num_probes must be an integer of at least 1, got 0"),
        ({"penalty": "l1"}, ValueError, "penalty must be one of"),
        ({"probe": "sphere"}, TypeError, "unknown option 'probe'"),
        ({"reduction": "none"}, TypeError, "reduction is no option"),
        ({"probe_vectors": torch.zeros(1, 2, 3)}, TypeError, "probe_vectors belongs to the call"),
    ],
)
def test_bad_options_are_found_at_once(options, error, message):
    with pytest.raises(error, match=message):
        normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1, **options)


def test_bad_criterion_and_targets():
    model, x, y = make()
    with pytest.raises(ValueError, match=r"criterion must return a scalar, got shape \(20,\)"):
        normalign.GrokAlignLoss(nn.CrossEntropyLoss(reduction="none"), 0.1)(model, x, y)
    loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), 0.1)
    with pytest.raises((IndexError, ValueError)):
        loss_fn(model, x, y + 1)  # class 3 of 3
    with pytest.raises((RuntimeError, ValueError)):
        loss_fn(model, x, y[:7])
    loss_fn(model, x, y)


def test_dict_models_and_keyword_arguments():
    model, x, y = make()
    options = {
        "forward": lambda m, a: {"scores": m(a)},
        "output": "scores",
    }
    v = torch.randn(1, 20, 3)
    for weight in (0, 0.5):
        found = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight, **options)(
            model, x, y, probe_vectors=v
        )
        expected = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight)(
            model, x, y, probe_vectors=v
        )
        torch.testing.assert_close(found, expected)
