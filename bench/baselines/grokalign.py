"""Other ways to take one training step with a Jacobian penalty (arXiv 2605.08464).

With P = I - x x^T / |x|^2 and one probe v per sample, E[v v^T] = I, the penalties are means of

- ``orthogonal``: |P J^T v|^2
- ``jacobian``: |J^T v|^2
- ``joint``: |J^T v| + |f(x) - J x|^2

Every function here builds a step: a callable that clears the gradients, computes loss and penalty,
leaves the gradient of ``loss + weight * penalty`` in the parameters, and returns both values.
``draw`` makes the probes from the logits' shape, so that a test can give everyone the same ones.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.problems import Problem

Draw = Callable[[Tensor], Tensor]
Step = Callable[[], tuple[Tensor, Tensor]]


def gaussian(logits: Tensor) -> Tensor:
    """A fresh standard normal probe for each sample."""
    return torch.randn_like(logits)


def sphere(logits: Tensor) -> Tensor:
    """A fresh unit probe, scaled so that E[v v^T] = I."""
    v = torch.randn_like(logits)
    return v * (v.shape[1] ** 0.5 / v.norm(dim=1, keepdim=True))


def _penalty(kind: str, g: Tensor, x: Tensor) -> Tensor:
    """Batch mean of the projected or plain squared norm of ``g = J^T v``."""
    g, x = g.flatten(1), x.flatten(1)
    if kind == "orthogonal":
        g = g - (g * x).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True) * x
    return (g * g).sum(1).mean()


def _attention(problem: Problem) -> Any:
    """The fused attention of the CPU has no second derivative; the math form has."""
    is_attention = any(isinstance(m, torch.nn.MultiheadAttention) for m in problem.model.modules())
    return sdpa_kernel(SDPBackend.MATH) if is_attention else contextlib.nullcontext()


def plain(problem: Problem) -> Step:
    """No penalty."""
    model, x, y = problem.model, problem.x, problem.y

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = problem.criterion(model(x), y)
        loss.backward()
        return loss.detach(), loss.new_zeros(())

    return step


def double_backward(problem: Problem, penalty: str, draw: Draw = gaussian) -> Step:
    """The usual eager form: a vector-Jacobian product with a graph, then backward through it."""
    model, y, x = problem.model, problem.y, problem.x.detach().requires_grad_()
    parameters = list(model.parameters())

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with _attention(problem):
            logits = model(x)
            (g,) = torch.autograd.grad(logits, x, draw(logits), create_graph=True)
            value = _penalty(penalty, g, x.detach())
            loss = problem.criterion(logits, y)
            (loss + problem.weight * value).backward(inputs=parameters)
        return loss.detach(), value.detach()

    return step


def jacobian_regulariser(problem: Problem, draw: Draw = sphere) -> Step:
    """A per-batch Jacobian regulariser as published for robustness (arXiv 1908.02729).

    Unit probes, no projection, and a penalty that is added to the loss of a model whose input
    requires a gradient: the backward pass then also computes the input's.
    """
    model, y, x = problem.model, problem.y, problem.x.detach().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        x.grad = None
        with _attention(problem):
            logits = model(x)
            v = draw(logits)
            (g,) = torch.autograd.grad(logits, x, v, retain_graph=True, create_graph=True)
            value = (g * g).sum() / g.shape[0]
            loss = problem.criterion(logits, y)
            (loss + problem.weight * value).backward()
        return loss.detach(), value.detach()

    return step


def authors_joint(problem: Problem, draw: Draw = sphere) -> Step:
    """The paper authors' algorithm.

    J x by the double-backward trick (the derivative of J^T u in u, applied to x), the probe's
    J^T v by a second vector-Jacobian product, and then a backward pass through both. As there, the
    input requires a gradient, also where it is the direction x.
    """
    model, y, x = problem.model, problem.y, problem.x.detach().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        x.grad = None
        with _attention(problem):
            logits = model(x)
            u = torch.zeros_like(logits, requires_grad=True)
            (jtu,) = torch.autograd.grad(logits, x, u, create_graph=True)
            (jx,) = torch.autograd.grad(jtu, u, x, create_graph=True)
            (jtv,) = torch.autograd.grad(logits, x, draw(logits), create_graph=True)
            norm = jtv.flatten(1).norm(dim=1).mean()
            value = norm + (logits - jx).square().sum(1).mean()
            loss = problem.criterion(logits, y)
            (loss + problem.weight * value).backward()
        return loss.detach(), value.detach()

    return step


def torch_func(
    problem: Problem, penalty: str, draw: Draw = gaussian, compiled: str | None = None
) -> Step:
    """``torch.func.grad`` of a loss with a ``vjp`` inside; ``compiled`` names a backend."""
    model, x, y = problem.model, problem.x, problem.y
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        shape = model(x)

    def total(
        params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, v: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        def forward(t: Tensor) -> Tensor:
            # Copies, because transforms forbid mutation: running statistics are not updated.
            copies = {k: b.clone() for k, b in buffers.items()}
            return functional_call(model, {**params, **copies}, t)

        logits, vjp = torch.func.vjp(forward, x)
        value = _penalty(penalty, vjp(v)[0], x)
        loss = problem.criterion(logits, y)
        return loss + problem.weight * value, (loss, value)

    gradient = torch.func.grad(total, has_aux=True)
    if compiled:
        gradient = torch.compile(gradient, backend=compiled)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        values = {k: p.detach() for k, p in parameters.items()}
        with _attention(problem):
            grads, (loss, value) = gradient(values, dict(model.named_buffers()), x, y, draw(shape))
        for name, p in parameters.items():
            p.grad = grads[name]
        return loss.detach(), value.detach()

    return step


class ProductFloor:
    """Only the matrix products of the closed form, through torch.

    Forward, probe, tangent and backward products, and the weight gradients as one product over
    stacked operands. Buffers are made once; no activation, bias or reduction is computed. Where the
    second derivative of the activation is 0 the backward product does not wait for the tangent,
    and shares one stacked product with the probe.
    """

    def __init__(self, problem: Problem) -> None:
        self.batch = batch = problem.x.shape[0]
        self.weights = [p.detach() for p in problem.model.parameters() if p.ndim == 2]
        # Rows :batch hold activations and the task's adjoints, the others tangents and the probe's.
        self.a = [problem.x.new_zeros(2 * batch, n) for n in problem.widths]
        self.delta = [problem.x.new_zeros(2 * batch, n) for n in problem.widths]
        self.grads = [torch.empty_like(w) for w in self.weights]
        self.a[0][:batch] = problem.x
        self.delta[-1].normal_()
        self.stacked = problem.piecewise_linear

    def __call__(self) -> None:
        """Runs the products."""
        w, a, delta, mm = self.weights, self.a, self.delta, torch.mm
        first, second = slice(None, self.batch), slice(self.batch, None)
        inner = range(len(w) - 1)
        for i in range(len(w)):
            mm(a[i][first], w[i].t(), out=a[i + 1][first])
        probe = slice(None) if self.stacked else second
        for i in reversed(inner):
            mm(delta[i + 2][probe], w[i + 1], out=delta[i + 1][probe])
        mm(delta[1][second], w[0], out=a[0][second])
        for i in inner:
            mm(a[i][second], w[i].t(), out=a[i + 1][second])
        if not self.stacked:
            for i in reversed(inner):
                mm(delta[i + 2][first], w[i + 1], out=delta[i + 1][first])
        for i in range(len(w)):
            mm(delta[i + 1].t(), a[i], out=self.grads[i])


def flops(problem: Problem) -> float:
    """Operations of the products above: 6C, less one product each in the first and last layer.

    The first layer sends nothing back to the input, and the tangent's last output is not needed.
    """
    sizes = [d * n for d, n in itertools.pairwise(problem.widths)]
    return 2.0 * problem.x.shape[0] * (6 * sum(sizes) - sizes[0] - sizes[-1])
