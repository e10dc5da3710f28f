"""The regulariser under the name and signature that the paper's authors publish."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _diagnose, _functional, _general, _inputs, _path
from normalign._stack import StackPlan


class GrokAlign(nn.Module):
    """Task loss plus ``lambda_reg * (E||J||_F + E|f(x) - J x|^2)``, in the authors' form.

    A drop-in for the class that accompanies arXiv 2605.08464: ``loss = regulariser(inputs)``. The
    values are theirs for the same global seed: one probe ``v`` of unit norm per sample is drawn
    from torch's global generator, and ``||J||_F`` is ``sqrt(max(c |J^T v|^2, 1e-8))``. So where
    the Jacobian is tiny there is no gradient; ``normalign.grokalign(penalty="joint")`` has one.

    Stacks of Linear and activation layers take the fused path where no metrics are asked for. It
    knows no clamp: should a norm be below 1e-4 while its sample's penalty is not, the value is up
    to 1e-4 lower than theirs. (Where a sample's whole penalty is that small, the general path with
    the clamp serves.)

    What differs: the inputs' ``requires_grad`` is left alone, ``J x`` is always exact, and logits
    without a gradient path to the inputs are an error instead of a Jacobian of 0.

    Args:
        model: The network; registered as a submodule, as theirs is.
        criterion: Called with the logits; returns a scalar.
        lambda_reg: Factor of the penalty.
        offset_eps: Step of the finite difference that their class falls back to; unused here.
        return_metrics: Whether a call returns ``(loss, metrics)``.
        device: Where probes are drawn; by default the device of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[Tensor], Tensor],
        lambda_reg: float = 0.1,
        offset_eps: float = 1e-4,
        return_metrics: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.lambda_reg = lambda_reg
        self.offset_eps = offset_eps
        self.return_metrics = return_metrics
        self.device = device if device is not None else next(model.parameters()).device

    def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, dict[str, float]]:
        """The total loss; with ``return_metrics`` also its parts as numbers.

        Args:
            inputs: Shape ``(B, ...)``, floating point.

        Returns:
            The loss, or the loss and ``{"task_loss", "jac_norm", "offset_norm"}``.
        """
        _inputs.check_x(inputs)
        _inputs.check_model(self.model, inputs)
        _diagnose.check_not_compiled(self.model)
        if inputs.is_cpu:
            _inputs.check_finite(inputs)
        fused = None if self.return_metrics else self._fused(inputs)
        if fused is not None:
            logits, penalty = fused
            return self.criterion(logits) + self.lambda_reg * penalty
        parts: list[Tensor] = []

        def unit_probe(flat: Tensor) -> Tensor:
            return self._unit_probe(flat.shape)

        def terms(
            model: Any, flat: Tensor, leaf: Tensor, probes: Tensor, penalty: str, training: bool
        ) -> Tensor:
            products, offset = _general.jacobian_products(model, flat, leaf, probes, True, training)
            assert offset is not None
            squares = products[0].square().sum(1) * flat.shape[1]
            parts.append(squares.clamp(min=1e-8).sqrt().mean())
            parts.append(offset.square().sum())
            return parts[0]

        logits, _ = _general.run(self.model, self.model, inputs, unit_probe, "joint", "none", terms)
        jacobian_norm, offset_norm = parts
        offset_norm = offset_norm / (logits.numel() // logits.shape[-1])  # sums over the last axis
        task_loss = self.criterion(logits)
        total = task_loss + self.lambda_reg * (jacobian_norm + offset_norm)
        if not self.return_metrics:
            return total
        return total, {
            "task_loss": task_loss.item(),
            "jac_norm": jacobian_norm.item(),
            "offset_norm": offset_norm.item(),
        }

    def _unit_probe(self, shape: tuple[int, ...]) -> Tensor:
        """Probes ``(1, B, c)`` as their code draws them."""
        v: Tensor = torch.randn(shape, device=self.device)
        v = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-8)
        return v.unsqueeze(0)

    def _fused(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logits and penalty by the fused stack; ``None`` where it or its clamp cannot serve."""
        path = _path.choose(self.model, inputs, "joint", "auto", _functional.needed())
        if not isinstance(path, StackPlan):
            return None
        state = torch.get_rng_state()
        v = self._unit_probe((inputs.shape[0], path.outputs)) * math.sqrt(path.outputs)
        logits, penalties = path.run(inputs, v.to(inputs.dtype), "joint", "none")
        if penalties.detach().amin() < 1e-4:
            torch.set_rng_state(state)  # the general path draws the same probes
            return None
        return logits, penalties.mean()
