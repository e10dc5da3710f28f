"""The wrappers against definitions written out in float64 numpy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from normalign.optim import EgalitarianGradient, Grokfast, OrthoGrad

LR, STEPS = 0.1, 5


def _grokfast(alpha, amplification):
    average = None

    def transform(w, g):
        nonlocal average
        average = g if average is None else alpha * average + (1 - alpha) * g
        return g + amplification * average

    return transform


def _orthograd(rescale):
    def transform(w, g):
        projector = np.eye(w.size) - np.outer(w, w) / (w.ravel() @ w.ravel())
        r = (projector @ g.ravel()).reshape(g.shape)
        return r * (np.linalg.norm(g) / np.linalg.norm(r)) if rescale else r

    return transform


def _egalitarian(w, g):
    # The defining formula, by an eigendecomposition and not by the SVD that the package takes.
    values, vectors = np.linalg.eigh(g @ g.T)
    inverse_root = (vectors / np.sqrt(values)) @ vectors.T
    return inverse_root @ g


CASES = {
    "grokfast": (lambda base: Grokfast(base, 0.8, 0.1), lambda: _grokfast(0.8, 0.1)),
    "orthograd": (OrthoGrad, lambda: _orthograd(True)),
    "orthograd unscaled": (lambda base: OrthoGrad(base, rescale=False), lambda: _orthograd(False)),
    "egalitarian": (EgalitarianGradient, lambda: _egalitarian),
}


@pytest.mark.parametrize("name", CASES)
# float32: five steps, each rounding at 6e-8 relative, of an amplified gradient of size about 5.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_matches_definition(name, dtype, tolerance):
    wrap, definition = CASES[name]
    transform = definition()
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(4, 7, generator=generator, dtype=dtype))
    w = p.detach().double().numpy().copy()
    optimizer = wrap(torch.optim.SGD([p], lr=LR))
    for _ in range(STEPS):
        g = torch.randn(4, 7, generator=generator, dtype=dtype)
        p.grad = g
        kept = g.clone()
        optimizer.step()
        assert p.grad is g
        assert torch.equal(g, kept)
        w = w - LR * transform(w, g.double().numpy())
    np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=0, atol=tolerance)


def test_orthograd_keeps_the_weight_norm_to_first_order():
    p = nn.Parameter(torch.randn(30, dtype=torch.float64))
    before = p.detach().norm().item()
    optimizer = OrthoGrad(torch.optim.SGD([p], lr=1e-4))
    p.grad = torch.randn(30, dtype=torch.float64)
    optimizer.step()
    moved = 1e-4 * p.grad.norm().item()
    assert p.detach().norm().item() == pytest.approx((before**2 + moved**2) ** 0.5, rel=1e-14)


def test_orthograd_corner_cases():
    zero = nn.Parameter(torch.zeros(3))
    parallel = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    tiny = nn.Parameter(torch.tensor([1e-30, 0.0, 0.0]))  # its square is 0 in float32
    zero.grad = torch.tensor([1.0, -1.0, 0.5])
    parallel.grad = 7 * parallel.detach()
    tiny.grad = torch.tensor([3.0, 4.0, 0.0])
    OrthoGrad(torch.optim.SGD([zero, parallel, tiny], lr=1.0)).step()
    torch.testing.assert_close(zero.detach(), torch.tensor([-1.0, 1.0, -0.5]))
    assert torch.equal(parallel.detach(), torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(tiny.detach(), torch.tensor([1e-30, -5.0, 0.0]))


def test_egalitarian_rank_deficient_vector_and_convolution():
    deficient = torch.outer(torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 2.0]))
    parameters = [nn.Parameter(torch.zeros(s)) for s in ((3, 2), (2,), (2, 3, 2, 2), (2, 2))]
    parameters[0].grad = deficient
    parameters[1].grad = torch.tensor([3.0, -4.0])
    parameters[2].grad = torch.randn(2, 3, 2, 2)
    parameters[3].grad = torch.zeros(2, 2)
    EgalitarianGradient(torch.optim.SGD(parameters, lr=1.0)).step()
    moved = [-p.detach() for p in parameters]
    torch.testing.assert_close(moved[0], torch.tensor([[0.0, 0.6], [0.0, 0.0], [0.0, 0.8]]))
    torch.testing.assert_close(moved[1], torch.tensor([0.6, -0.8]))
    rows = moved[2].reshape(2, 12)
    torch.testing.assert_close(rows @ rows.T, torch.eye(2))
    assert torch.equal(moved[3], torch.zeros(2, 2))


@pytest.mark.parametrize("name", CASES)
def test_resumes_exactly_and_follows_a_scheduler(name):
    wrap, _ = CASES[name]

    def build(net):
        optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=1e-2))
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def train(net, optimizer, scheduler, steps):
        for _ in range(steps):
            loss = (net(torch.ones(2, 3)) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    net = nn.Linear(3, 4)
    optimizer, scheduler = build(net)
    train(net, optimizer, scheduler, 3)
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    twin = copy.deepcopy(net)
    twin_optimizer, twin_scheduler = build(twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin_scheduler.load_state_dict(scheduler.state_dict())
    train(net, optimizer, scheduler, 3)
    train(twin, twin_optimizer, twin_scheduler, 3)
    assert torch.equal(net.weight, twin.weight)
    assert torch.equal(net.bias, twin.bias)


def test_closure_runs_once_and_unused_parameters_stay():
    net, unused = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = Grokfast(torch.optim.SGD([*net.parameters(), unused], lr=0.1))
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1
    assert torch.equal(unused.detach(), torch.ones(2))


def test_added_parameters_are_trained():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Grokfast(torch.optim.SGD([first], lr=1.0), amplification=1.0)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    first.grad = second.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((2,), -1.0))
    assert torch.equal(second.detach(), torch.zeros(2))
    assert len(optimizer.param_groups) == 2


def test_gradients_are_restored_after_an_error():
    p = nn.Parameter(torch.ones(2))
    optimizer = Grokfast(torch.optim.SGD([p], lr=1.0))
    optimizer.base.step = lambda: 1 / 0
    p.grad = grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert p.grad is grad


def test_bad_input():
    base = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got list"):
        OrthoGrad([1])
    with pytest.raises(TypeError, match="first-order"):
        Grokfast(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\), got 1"):
        Grokfast(base, alpha=1)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="amplification must be finite"):
            Grokfast(base, amplification=bad)
    with pytest.raises(ValueError, match="no entry 'base'"):
        OrthoGrad(base).load_state_dict(base.state_dict())
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="must be dense and real"):
        OrthoGrad(torch.optim.SGD(embedding.parameters(), lr=0.1)).step()
