"""Every picture of the report."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from grokking.methods import METHODS
from grokking.tasks import TASKS

Row = dict[str, Any]
COLOURS = dict(zip(METHODS, plt.get_cmap("tab10").colors, strict=False))
PANELS = (
    ("test", "test accuracy, %"),
    ("penalty", "penalty of the last batch"),
    ("normal", "normal alignment"),
    ("centroid", "centroid alignment"),
    ("rank", "effective rank of J"),
)


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Accuracy, penalty and geometry of each method's traced run; dots mark the grok."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(19, 3.8), layout="constrained")
    for row in rows:
        colour = COLOURS[row["method"]]
        for axis, (name, _) in zip(axes, PANELS, strict=True):
            if name == "penalty" and METHODS[row["method"]].penalty is None:
                continue
            history = [h for h in row["history"] if name in h]
            epochs = np.array([h["epoch"] for h in history]) + 1
            at = next((i for i, h in enumerate(history) if h["epoch"] == row["grokked"]), None)
            # Before the first step no penalty has been computed.
            values = np.array([h[name] for h in history])
            start = 1 if name == "penalty" else 0
            label = METHODS[row["method"]].title if name == "test" else None
            axis.plot(epochs[start:], values[start:], color=colour, lw=1.3, label=label)
            if at is not None and at >= start:
                axis.plot(epochs[at], values[at], "o", color=colour, ms=5)
    for axis, (name, title) in zip(axes, PANELS, strict=True):
        axis.set(xscale="log", xlabel="epoch + 1", title=title)
        axis.grid(alpha=0.3)
        if name == "penalty":
            axis.set_yscale("log")
    axes[0].axhline(TASKS[rows[0]["task"]].test_above, color="grey", lw=0.8, ls=":")
    figure.legend(loc="outside lower center", ncols=len(rows), fontsize=9)
    seed = rows[0]["seed"]
    figure.suptitle(f"{TASKS[rows[0]['task']].title}, seed {seed}; a dot marks the grok")
    _save(figure, path)


def phase_map(cells: dict[tuple[int, float], float], cap: int, path: pathlib.Path) -> None:
    """Median epochs to grok over training-set size and penalty weight."""
    samples, weights = (sorted({key[i] for key in cells}) for i in (0, 1))
    grid = np.array([[cells.get((n, w), np.nan) for n in samples] for w in weights])
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    shown = np.log10(np.where(np.isinf(grid), np.nan, grid))
    colours = plt.get_cmap("viridis_r").copy()
    colours.set_bad("lightgrey")
    image = axis.imshow(shown, cmap=colours, aspect="auto", origin="lower")
    for i, j in np.ndindex(grid.shape):
        value = grid[i, j]
        text = "" if np.isnan(value) else f">{cap}" if np.isinf(value) else f"{value:g}"
        dark = np.isfinite(value) and shown[i, j] > np.nanmean(shown)
        axis.text(j, i, text, ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(samples)), [str(n) for n in samples])
    axis.set_yticks(range(len(weights)), [f"{w:g}" for w in weights])
    axis.set(xlabel="training points", ylabel="weight of the orthogonal penalty")
    axis.set_title("Sparse parity: median epochs to grok (0: baseline)")
    figure.colorbar(image, label="log10 epochs")
    _save(figure, path)


def ablation(differences: dict[str, tuple[float, float, float]], path: pathlib.Path) -> None:
    """Paired relative difference in epochs, orthogonal against plain Jacobian norm."""
    figure, axis = plt.subplots(figsize=(7, 0.6 * len(differences) + 1.4), layout="constrained")
    for i, (mean, low, high) in enumerate(differences.values()):
        axis.plot([low, high], [i, i], color="tab:blue", lw=3)
        axis.plot(mean, i, "o", color="tab:blue")
    axis.axvline(0, color="grey", lw=0.8)
    axis.set_yticks(range(len(differences)), differences)
    axis.set(xlabel="epochs: orthogonal minus Jacobian norm, % (95% interval)")
    axis.set_ylim(-0.6, len(differences) - 0.4)
    axis.grid(axis="x", alpha=0.3)
    _save(figure, path)
