"""The figures of a robustness report, as text, numbers and a plot."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from normalign._pgd import Settings


@dataclasses.dataclass
class RobustnessReport:
    """What ``robustness_report`` measured; shares lie in [0, 1].

    Attributes:
        rows: How many inputs.
        clean_accuracy: Share classified correctly without an attack.
        eps: Radii, ascending, from 0.
        robust_accuracy: Share classified correctly at every radius up to each ``eps``; starts at
            the clean accuracy and never rises.
        accuracy_at_result: Share correct at the attack's own result for each ``eps`` alone. With
            ``attack="published"`` this is the published robust accuracy, which may rise with eps
            and counts wrong inputs that an attack put right.
        attack_success_published: ``(clean - accuracy_at_result) / clean``; NaN if none is correct.
        attack_success_on_correct: Share of the correctly classified inputs that some radius up to
            ``eps`` turned; NaN if there is none.
        zero_gradient_share: Share of the attack's gradients that were exactly zero, for each
            ``eps``. A large share means that the attack failed, not that the model resists.
        normal_alignment: Mean ``|cos|`` between input and first right singular vector of the
            Jacobian; None where not asked for.
        effective_rank: Mean effective rank of the Jacobian; None where not asked for.
        certified_accuracy: Share that provably keeps its correct label within each ``eps``; None
            for models without a certificate.
        settings: The attack.
    """

    rows: int
    clean_accuracy: float
    eps: list[float]
    robust_accuracy: list[float]
    accuracy_at_result: list[float]
    attack_success_published: list[float]
    attack_success_on_correct: list[float]
    zero_gradient_share: list[float]
    normal_alignment: float | None
    effective_rank: float | None
    certified_accuracy: list[float] | None
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers, lists and dictionaries."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        s = self.settings
        lines = [
            f"clean accuracy {self.clean_accuracy:.4f} on {self.rows} rows; {s.norm} attack, "
            f"{s.loss} loss, {s.steps} steps, {s.restarts} restart(s)",
            "   eps  robust  at result  success  on correct  certified  zero gradients",
        ]
        for i, eps in enumerate(self.eps):
            certified = math.nan if self.certified_accuracy is None else self.certified_accuracy[i]
            lines.append(
                f"{eps:6.3g}  {self.robust_accuracy[i]:6.4f}     {self.accuracy_at_result[i]:6.4f}"
                f"   {self.attack_success_published[i]:6.4f}      "
                f"{self.attack_success_on_correct[i]:6.4f}     {certified:6.4f}"
                f"          {self.zero_gradient_share[i]:6.4f}"
            )
        if self.normal_alignment is not None and self.effective_rank is not None:
            lines.append(
                f"normal alignment {self.normal_alignment:.4f}, "
                f"effective rank {self.effective_rank:.3f}"
            )
        return "\n".join(lines)

    def plot(self, ax: Any = None, label: str | None = None) -> Any:
        """Draws robust (and certified) accuracy against eps; needs matplotlib.

        Args:
            ax: Axes to draw on; ``None`` makes a figure.
            label: Name of the model in the legend.

        Returns:
            The axes.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(5, 3.5), layout="constrained")
        name = label or "robust"
        (line,) = ax.plot(self.eps, self.robust_accuracy, marker="o", label=name)
        if self.certified_accuracy is not None:
            ax.plot(
                self.eps,
                self.certified_accuracy,
                linestyle=":",
                color=line.get_color(),
                label=f"{name}, certified",
            )
        ax.set_xlabel(f"eps ({self.settings.norm})")
        ax.set_ylabel("accuracy")
        ax.set_ylim(-0.02, 1.02)
        ax.legend()
        return ax
