"""Values and gradients of grokalign against the exact Jacobian in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalign


def net(activation=nn.Tanh, outputs=3):
    return nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, outputs)).double()


def definition(model, x, v, penalty):
    """The penalty of each sample from its whole Jacobian; v: (P, B, c)."""
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)  # (B, c, d)
    g = torch.einsum("pbc,bcd->pbd", v, jacobian)
    if penalty == "orthogonal":
        unit = x / x.norm(dim=1, keepdim=True)
        g = g - (g * unit).sum(-1, keepdim=True) * unit
    squares = g.square().sum(-1).mean(0)
    if penalty != "joint":
        return squares
    offset = model(x) - torch.einsum("bcd,bd->bc", jacobian, x)
    return squares.sqrt() + offset.square().sum(1)


@pytest.mark.parametrize("implementation", ["native", "general", "reference"])
@pytest.mark.parametrize("penalty", ["orthogonal", "jacobian", "joint"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.LeakyReLU])  # curved, and piecewise linear
def test_value_and_gradient_equal_the_definition(implementation, penalty, count, activation):
    if (implementation, penalty, activation) == ("native", "joint", nn.Tanh):
        pytest.skip("the offset is fused for piecewise linear stacks")
    model, x = net(activation), torch.randn(7, 5, dtype=torch.float64)
    v = torch.randn(count, 7, 3, dtype=torch.float64)
    y = torch.arange(7) % 3
    expected = definition(model, x, v, penalty)
    logits, value = normalign.grokalign(
        model,
        x,
        penalty=penalty,
        probe_vectors=v,
        implementation=implementation,
        reduction="none",
    )
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, model(x))
    loss = F.cross_entropy(logits, y) + value.mean()
    exact = F.cross_entropy(model(x), y) + expected.mean()
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(exact, parameters),
        rtol=1e-10,
        atol=1e-12,
    )
