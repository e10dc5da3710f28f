"""The authors' class: values by their formula on the probes that their code would draw."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normalign.compat import GrokAlign


def by_formula(model, x, criterion, weight, seed):
    """Total and parts in float64, from the whole Jacobian."""
    model, x = copy.deepcopy(model).double(), x.double()
    torch.manual_seed(seed)
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)  # (B, c, d)
    logits = model(x)
    v = torch.randn(logits.shape)
    v = (v / v.norm(dim=1, keepdim=True)).double()
    g = torch.einsum("bc,bcd->bd", v, jacobian)
    norm = (logits.shape[1] * g.square().sum(1)).clamp(min=1e-8).sqrt().mean()
    offset = (logits - torch.einsum("bcd,bd->bc", jacobian, x)).square().sum(1).mean()
    total = criterion(logits) + weight * (norm + offset)
    gradient = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return total.detach(), norm.item(), offset.item(), gradient


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("metrics", [False, True])
def test_values_and_gradients_for_the_same_seed(activation, metrics):
    model = nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 4))
    x, y = torch.randn(7, 6), torch.arange(7) % 4

    def criterion(logits):
        return F.cross_entropy(logits, y)

    total, norm, offset, gradient = by_formula(model, x, criterion, 0.3, seed=11)
    regulariser = GrokAlign(model, criterion, lambda_reg=0.3, return_metrics=metrics)
    torch.manual_seed(11)
    loss = regulariser(x)
    if metrics:
        loss, parts = loss
        assert parts == pytest.approx(
            {"task_loss": parts["task_loss"], "jac_norm": norm, "offset_norm": offset}, rel=1e-5
        )
    torch.testing.assert_close(loss.double(), total, rtol=1e-5, atol=0)
    loss.backward()
    assert not x.requires_grad
    # float32 against float64, with cancellation in the offset
    for p, g in zip(model.parameters(), gradient, strict=True):
        torch.testing.assert_close(p.grad.double(), g, rtol=1e-4, atol=1e-6)


def test_the_fused_path_is_taken_and_keeps_the_random_stream(monkeypatch):
    from normalign import _general

    def refuse(*_):
        raise AssertionError("the general path ran")

    model, x = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)), torch.randn(7, 6)
    regulariser = GrokAlign(model, lambda z: z.mean())
    torch.manual_seed(4)
    regulariser(x)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    torch.randn(7, 4)  # all that their code draws
    assert torch.equal(torch.get_rng_state(), after)
    monkeypatch.setattr(_general, "run", refuse)
    regulariser(x)


def test_the_clamp_is_theirs():
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.mul_(1e-7)
        model.bias.zero_()
    regulariser = GrokAlign(model, lambda logits: logits.sum() * 0, lambda_reg=1.0)
    loss = regulariser(torch.randn(4, 5))
    torch.testing.assert_close(loss, torch.tensor(1e-4), rtol=1e-5, atol=0)
    loss.backward()
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


def test_it_is_a_module_like_theirs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    regulariser = GrokAlign(model, nn.functional.mse_loss, 0.1, 1e-4, False, "cpu")
    assert list(regulariser.state_dict()) == ["model.1.weight", "model.1.bias"]
    assert regulariser.eval().model.training is False
    sequence = nn.Linear(4, 3)  # logits (B, T, c): their offset is summed over the last axis
    x = torch.randn(2, 5, 4)
    _, parts = GrokAlign(sequence, lambda z: z.mean(), return_metrics=True)(x)
    assert parts["offset_norm"] == pytest.approx(sequence.bias.square().sum().item(), rel=1e-5)


def test_bad_input():
    regulariser = GrokAlign(nn.Linear(5, 3), lambda z: z.mean())
    with pytest.raises(TypeError, match="floating-point dtype"):
        regulariser(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="dtype and device of the model"):
        regulariser(torch.zeros(2, 5).double())


def test_no_gradient_path():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    with pytest.raises(ValueError, match="no gradient path"):
        GrokAlign(Detached(5, 3), lambda z: z.mean())(torch.zeros(2, 5))
