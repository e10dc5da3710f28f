"""The peers that the GrokAlign bench times compute what they claim: compared with plain loops."""

import pytest
import torch
from baselines import grokalign as peers
from baselines import problems


def _problem(name):
    """A small float64 relative of a bench problem."""
    torch.manual_seed(0)
    if name in ("cnn", "transformer"):
        problem = problems.PROBLEMS[name]()
    elif name == "square":
        problem = problems._modular_addition(7, p=5, hidden=8)
    else:
        activation = {"relu": torch.nn.ReLU, "gelu": torch.nn.GELU}[name]
        problem = problems._stack(name, (6, 8, 8, 5), 7, activation)
    problem.model.double()
    problem.x, problem.y = problem.x[:7].double(), problem.y[:7]
    return problem


def _gradients(problem):
    return [p.grad.clone() for p in problem.model.parameters()]


def _by_definition(problem, penalty, v):
    """Jacobians of each sample, in full; gradients by reverse mode through them."""
    model, x = problem.model, problem.x
    model.zero_grad()
    values = []
    for i in range(len(x)):
        jacobian = torch.autograd.functional.jacobian(
            lambda t: model(t[None])[0], x[i], create_graph=True
        ).flatten(1)
        row, direction = v[i] @ jacobian, x[i].flatten()
        if penalty == "orthogonal":
            row = row - (row @ direction) / (direction @ direction) * direction
        value = row @ row
        if penalty == "joint":
            value = value.sqrt() + (model(x[i][None])[0] - jacobian @ direction).square().sum()
        values.append(value)
    value = torch.stack(values).mean()
    loss = problem.criterion(model(x), problem.y)
    (loss + problem.weight * value).backward()
    return loss.detach(), value.detach(), _gradients(problem)


def _steps(problem, penalty, draw):
    if penalty == "joint":
        return {"authors": peers.authors_joint(problem, draw)}
    steps = {
        "double backward": peers.double_backward(problem, penalty, draw),
        "torch.func": peers.torch_func(problem, penalty, draw),
    }
    if penalty == "jacobian":
        steps["regulariser"] = peers.jacobian_regulariser(problem, draw)
    return steps


@pytest.mark.parametrize("name", ["relu", "gelu", "square"])
@pytest.mark.parametrize("penalty", ["orthogonal", "jacobian", "joint"])
def test_peers_follow_the_definition(name, penalty):
    problem = _problem(name)
    v = peers.sphere(torch.empty(7, problem.widths[-1], dtype=torch.float64))
    expected = _by_definition(problem, penalty, v)
    for step in _steps(problem, penalty, lambda _: v).values():
        loss, value = step()
        # float64 throughout; only the order of summation differs
        torch.testing.assert_close((loss, value, _gradients(problem)), expected)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_peers_agree_on_general_models(name):
    # BatchNorm ties the samples together, so the per-sample definition does not apply
    problem = _problem(name)
    v = torch.randn(7, 10, dtype=torch.float64)
    answers = []
    for step in _steps(problem, "orthogonal", lambda _: v).values():
        answers.append((step(), _gradients(problem)))
    torch.testing.assert_close(answers[0], answers[1])


def test_compiled_peer():
    problem = _problem("relu")
    v = torch.randn(7, 5, dtype=torch.float64)
    expected = (peers.torch_func(problem, "orthogonal", lambda _: v)(), _gradients(problem))
    step = peers.torch_func(problem, "orthogonal", lambda _: v, compiled="aot_eager")
    torch.testing.assert_close((step(), _gradients(problem)), expected)


def test_probes_have_identity_covariance():
    v = peers.sphere(torch.empty(20000, 3))
    torch.testing.assert_close(v.norm(dim=1), torch.full((20000,), 3**0.5))
    # the standard error of an entry is below 1 / sqrt(20000) = .007
    torch.testing.assert_close(v.T @ v / 20000, torch.eye(3), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_floor_runs_the_products_of_the_closed_form(name):
    """The products alone are the closed form of a net without activations."""
    problem = _problem(name)
    floor = peers.ProductFloor(problem)
    b, x, (w0, w1, w2) = len(problem.x), problem.x, floor.weights
    d, v = floor.delta[-1][:b].clone(), floor.delta[-1][b:].clone()
    floor()
    g = v @ w2 @ w1 @ w0
    torch.testing.assert_close(floor.a[0][b:], g)
    for gradient, expected in zip(
        floor.grads,
        [
            (d @ w2 @ w1).T @ x + (v @ w2 @ w1).T @ g,
            (d @ w2).T @ (x @ w0.T) + (v @ w2).T @ (g @ w0.T),
            d.T @ (x @ w0.T @ w1.T) + v.T @ (g @ w0.T @ w1.T),
        ],
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected)
