"""Outputs, arguments and inputs of models other than plain classifiers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalign
from normalign import reference

PENALTIES = ("orthogonal", "jacobian", "joint")


def relu_net(inputs=5, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def test_convolutional_output_is_flattened_per_sample():
    model, x = nn.Conv2d(2, 3, 3).double(), torch.randn(4, 2, 5, 5, dtype=torch.float64)
    logits, value = normalign.grokalign(model, x, penalty="jacobian", exact=True)
    assert logits.shape == (4, 3, 3, 3)
    jacobian = torch.autograd.functional.jacobian(lambda a: model(a[None]).flatten(), x[0])
    torch.testing.assert_close(value, jacobian.square().sum())  # the same for every x: linear
    v = torch.randn(2, 4, 27, dtype=torch.float64)
    _, value = normalign.grokalign(model, x, probe_vectors=v, reduction="none")
    g = torch.einsum("pbc,cd->pbd", v, jacobian.reshape(27, -1))
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True)
    r = g - (g * unit).sum(-1, keepdim=True) * unit
    torch.testing.assert_close(value, r.square().sum(-1).mean(0))


class Output:
    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda z: {"logits": z, "hidden": None}, "logits"),
        (lambda z: {"logits": z}, lambda result: result["logits"]),
        (Output, "logits"),
        (lambda z: (None, z), 1),
    ],
)
def test_logits_are_chosen(wrap, output):
    net, x, v = relu_net(), torch.randn(4, 5), torch.randn(1, 4, 3)
    expected = normalign.grokalign(net, x, probe_vectors=v)
    found = normalign.grokalign(lambda a: wrap(net(a)), x, probe_vectors=v, output=output)
    torch.testing.assert_close(found, expected)
    with pytest.raises((TypeError, ValueError), match="output="):
        normalign.grokalign(lambda a: wrap(net(a)), x, output=None if output != 1 else 7)


def test_forward_passes_more_arguments():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = relu_net()

        def forward(self, x, *, scale):
            return self.net(x) * scale

    model, x, v = Scaled(), torch.randn(4, 5), torch.randn(1, 4, 3)
    _, value = normalign.grokalign(
        model, x, probe_vectors=v, forward=lambda m, a: m(a, scale=3.0), penalty="jacobian"
    )
    _, plain = normalign.grokalign(model.net, x, probe_vectors=v, penalty="jacobian")
    torch.testing.assert_close(value, 9 * plain)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_embeddings(penalty):
    """The way out for integer inputs: the penalty acts on the embeddings, which learn from it."""
    embedding, net = (
        nn.Embedding(11, 5).double(),
        nn.Sequential(nn.Flatten(), relu_net(15)).double(),
    )
    tokens, v = torch.randint(11, (4, 3)), torch.randn(1, 4, 3, dtype=torch.float64)

    def loss(x, call, **options):
        logits, value = call(net, x, penalty=penalty, **options)
        return F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])) + value

    weights = [embedding.weight, *net.parameters()]
    total = loss(embedding(tokens), normalign.grokalign, probe_vectors=v)
    exact = loss(embedding(tokens), reference.grokalign, probes=v)
    torch.testing.assert_close(
        torch.autograd.grad(total, weights), torch.autograd.grad(exact, weights)
    )

    def direct(weight):
        """By the whole Jacobian, for a second opinion on what flows through x."""
        x = F.embedding(tokens, weight).flatten(1)
        jacobian = torch.func.vmap(torch.func.jacrev(net[1]))(x)
        g = torch.einsum("bc,bcd->bd", v[0], jacobian)
        unit = x / x.norm(dim=1, keepdim=True)
        if penalty == "orthogonal":
            g = g - (g * unit).sum(1, keepdim=True) * unit
        if penalty != "joint":
            return g.square().sum(1).mean()
        offset = net[1](x) - torch.einsum("bcd,bd->bc", jacobian, x)
        return (g.norm(dim=1) + offset.square().sum(1)).mean()

    _, value = normalign.grokalign(net, embedding(tokens), penalty=penalty, probe_vectors=v)
    torch.testing.assert_close(
        torch.autograd.grad(value, embedding.weight, allow_unused=True)[0],
        torch.autograd.grad(direct(embedding.weight), embedding.weight, allow_unused=True)[0],
    )


def test_images_in_channels_last():
    model, v = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten()), torch.randn(1, 2, 36)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(
        normalign.grokalign(model, x.to(memory_format=torch.channels_last), probe_vectors=v),
        normalign.grokalign(model, x, probe_vectors=v),
    )
