"""The authors' algorithm that the RFAM bench times computes what it claims."""

import pytest
import torch
from baselines import rfam as authors

from normalign import reference


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _problem():
    x, z = torch.randn(9, 4).double(), torch.randn(20, 4).double()
    root = torch.randn(4, 4).double()
    return x, z, root @ root.T, torch.randn(20, 3).double()


def test_gram_solve_and_agop():
    x, z, m, a = _problem()
    k = reference.laplace_gram(z, z, m, 3.0)
    torch.testing.assert_close(authors.gram(x, z, m, 3.0), reference.laplace_gram(x, z, m, 3.0))
    torch.testing.assert_close((k + 0.1 * torch.eye(20)) @ authors.solve(k, a, 0.1), a)
    exact = reference.agop(x, z, a, m, 3.0)
    torch.testing.assert_close(authors.agop(x, z, a, m, 3.0), exact)


def test_fit_keeps_the_best_iteration_and_the_trace():
    x = torch.randn(60, 4)
    labels = (x[:, 0] > 0).long()
    y = torch.nn.functional.one_hot(labels, 2).float()
    m, a, best = authors.fit(x, y, 0.1, validation=(x, labels))
    torch.testing.assert_close(m.trace(), torch.tensor(4.0))
    f = authors.gram(x, x, m, 10.0) @ a
    assert (f.argmax(1) == labels).float().mean() > 0.9
    assert best.accuracy > 0.9
    assert 0 <= best.iteration < 5


def test_attack_ascends_within_its_ball():
    x, z, m, a = _problem()
    labels = torch.arange(9) % 3
    target = torch.nn.functional.one_hot(labels, 3).double()
    moved = authors.pgd(x, labels, z, a, m, 3.0, 0.5, first=x.clone())
    loss = [(authors.gram(q, z, m, 3.0) @ a - target).square().sum() for q in (x, moved)]
    assert (moved - x).abs().max() <= 0.5 + 1e-12
    assert loss[1] > loss[0]
