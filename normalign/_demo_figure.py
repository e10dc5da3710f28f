"""The figure of the demonstration; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

if TYPE_CHECKING:
    from normalign.demo import Run

COLOURS = {"baseline": "#b3541e", "GrokAlign": "#1f5fa8"}


def save(runs: Sequence[Run], path: str) -> None:
    """One row of panels for each task: accuracy, penalty, alignment over epochs."""
    tasks = list(dict.fromkeys(r.task for r in runs))
    figure = Figure(figsize=(12, 3.4 * len(tasks) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), 3, squeeze=False)
    for row, task in zip(panels, tasks, strict=True):
        for run in (r for r in runs if r.task == task):
            _draw(row, run)
        _label(row, task)
    lines, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(
        "From the same weights, with and without the penalty (dotted: the epoch that groks)"
    )
    figure.savefig(path, dpi=120)


def _draw(row: Any, run: Run) -> None:
    accuracy, penalty, alignment = row
    colour = COLOURS[run.method]
    accuracy.plot(run.epochs, run.test_accuracy, color=colour, lw=2, label=f"{run.method}, test")
    accuracy.plot(
        run.epochs, run.train_accuracy, color=colour, lw=1, ls="--", label=f"{run.method}, train"
    )
    penalty.plot(run.epochs, run.penalty, color=colour, lw=2, label=run.method)
    alignment.plot(run.epochs, run.alignment, color=colour, lw=2, label=run.method)
    if run.grokked is not None:
        for panel in row:
            panel.axvline(run.grokked, color=colour, lw=1, ls=":")
        accuracy.annotate(
            str(run.grokked), (run.grokked, 1.0), xytext=(0, 2), color=colour,
            xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip


def _label(row: Any, task: str) -> None:
    accuracy, penalty, alignment = row
    accuracy.set_title(f"{task}: accuracy", loc="left", pad=16)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracy.set_ylim(0, 1.03)
    penalty.set_title("orthogonal penalty (train)", loc="left", pad=16)
    penalty.set_yscale("log")
    alignment.set_title("normal alignment (test)", loc="left", pad=16)
    alignment.set_ylim(bottom=0)
    for panel in row:
        panel.set_xscale("log")
        panel.set_xlabel("epoch")
        panel.grid(alpha=0.25, lw=0.5)
        panel.spines[["top", "right"]].set_visible(False)
