"""The fused GrokAlign path for stacks of Linear and activation layers."""

from __future__ import annotations

from torch import Tensor, nn


class StackPlan:
    """A recognised stack: which layers, in which order, with which activations."""

    outputs: int  # c, so that probes can be drawn before the forward pass

    def run(self, x: Tensor, probes: Tensor, penalty: str, reduction: str) -> tuple[Tensor, Tensor]:
        """Logits ``(B, c)`` and the penalty: a scalar for ``"mean"``, ``(B,)`` for ``"none"``.

        ``probes`` has shape ``(P, B, c)``; the penalty is the mean over the P probes.
        """
        raise NotImplementedError


def plan(model: nn.Module, x: Tensor, penalty: str) -> StackPlan | str:
    """The plan for this model and input, or the reason why the general path must serve."""
    return "the fused stack is not built yet"
