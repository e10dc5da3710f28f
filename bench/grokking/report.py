"""The report: tables and figures from the file of runs, and from nothing else."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections import defaultdict
from typing import Any

import numpy as np

from grokking import figures
from grokking import theory as checks
from grokking.methods import METHODS
from grokking.runner import read
from grokking.tasks import TASKS

Row = dict[str, Any]
FIRST_TUNING_SEED = 100  # seeds from here on chose weights and rates; no table counts them
PAPER_SPEEDUP = {"parity": "19.76x"}  # what the paper states for GrokAlign over the baseline


def epochs_of(row: Row) -> float:
    """Epochs to grok; infinite for a run that never did."""
    return math.inf if row["grokked"] is None else row["grokked"]


def number(x: float) -> str:
    return "never" if math.isinf(x) else f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def spread(values: list[float]) -> str:
    """Mean and standard deviation of the runs that grokked."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "-"
    deviation = statistics.stdev(finite) if len(finite) > 1 else math.nan
    return number(statistics.mean(finite)) + (f" ± {deviation:.2g}" if len(finite) > 1 else "")


def table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(r) + " |" for r in rows) + "\n"


def _of_task(rows: list[Row], task: str) -> dict[str, list[Row]]:
    """Runs at the task's own settings and on the baseline's seeds, by method."""
    groups: dict[str, list[Row]] = {name: [] for name in METHODS}
    for row in rows:
        usual = TASKS[task].weights.get(row["method"], 0.0)
        if row["task"] == task and row["weight"] == usual and "/n" not in row["key"]:
            groups[row["method"]].append(row)
    shared = {r["seed"] for r in groups["baseline"]}
    if shared:  # a fair table: seeds that only an ablation has run stay out of it
        groups = {name: [r for r in g if r["seed"] in shared] for name, g in groups.items()}
    return {name: group for name, group in groups.items() if group}


def medians(groups: dict[str, list[Row]], value: str) -> dict[str, float]:
    """Median of each method's epochs or processor time to grok; infinite for most never."""
    out = {}
    for name, group in groups.items():
        values = [r[value] if r["grokked"] is not None else math.inf for r in group]
        out[name] = statistics.median(values)
    return out


def compare(rows: list[Row], task: str) -> str:
    """The task's table: epochs and processor time to grok, by method."""
    groups = _of_task(rows, task)
    epochs, seconds = medians(groups, "grokked"), medians(groups, "cpu")
    caps = sorted({r["cap"] for g in groups.values() for r in g})
    base = epochs.get("baseline", math.nan)
    lines = []
    for name, group in groups.items():
        each = [epochs_of(r) for r in group]
        gain = "-"
        if name != "baseline" and math.isfinite(epochs[name]) and not math.isnan(base):
            bound = "> " if math.isinf(base) else ""
            gain = f"{bound}{min(base, caps[-1]) / max(epochs[name], 1):.3g}x"
        weight = f"{group[0]['weight']:g}" if group[0]["weight"] else ""
        grokked = f"{sum(map(math.isfinite, each))} of {len(each)}"
        times = [number(epochs[name]), spread(each), gain, number(seconds[name])]
        lines.append([METHODS[name].title, weight, grokked, *times])
    header = ["method", "weight", "grokked", "median epochs", "mean ± sd", "speed-up", "CPU s"]
    text = f"### {TASKS[task].title}\n\n{table(header, lines)}"
    text += f"\nRuns stop at {' or '.join(map(str, caps))} epochs."
    if task in PAPER_SPEEDUP:
        text += f" The paper states {PAPER_SPEEDUP[task]} for GrokAlign."
    return text + "\n"


def verdicts(rows: list[Row], tasks: list[str]) -> str:
    """The claims, each as it came out."""
    lines = []
    for task in tasks:
        groups = _of_task(rows, task)
        epochs, seconds = medians(groups, "grokked"), medians(groups, "cpu")
        for method in ("orthogonal", "joint"):
            if method not in groups or "baseline" not in groups:
                continue
            word = "earlier" if epochs[method] < epochs["baseline"] else "NOT earlier"
            pair = f"median epoch {number(epochs[method])} against {number(epochs['baseline'])}"
            line = f"- {TASKS[task].title}: {METHODS[method].title} groks {word} ({pair})"
            if "joint_authors" in groups:
                word = "less" if seconds[method] < seconds["joint_authors"] else "NOT less"
                pair = f"{number(seconds[method])} against {number(seconds['joint_authors'])} s"
                line += f", in {word} processor time than the authors' algorithm ({pair})"
            lines.append(line + ".")
        order = sorted(epochs, key=epochs.__getitem__)
        names = ", ".join(METHODS[m].title for m in order)
        lines.append(f"- {TASKS[task].title}, earliest median first: {names}.")
    return "\n".join(lines) + "\n"


def rise(rows: list[Row], tasks: list[str]) -> str:
    """Geometry of the traced runs before, at and after the grok."""
    lines = []
    for row in rows:
        if row["history"] and row["task"] in tasks and "/n" not in row["key"]:
            history = [h for h in row["history"] if "normal" in h]
            pick = {"start": history[0], "end": history[-1]}
            for name in ("memorised", "grokked"):
                pick[name] = next((h for h in history if h["epoch"] == row[name]), None)
            cells = [TASKS[row["task"]].title, METHODS[row["method"]].title]
            for key in ("normal", "centroid", "rank"):
                shown = [pick[p] for p in ("start", "memorised", "grokked", "end")]
                cells.append(" → ".join("·" if h is None else f"{h[key]:.2f}" for h in shown))
            pairs = np.array([[h["normal"], h["centroid"]] for h in history])
            varies = len(pairs) > 2 and (pairs.std(0) > 0).all()
            cells.append(f"{np.corrcoef(pairs.T)[0, 1]:.2f}" if varies else "·")
            lines.append(cells)
    header = ["task", "method", "normal alignment", "centroid alignment", "effective rank", "r"]
    return table(header, lines)


def bootstrap(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95% percentile interval."""
    draws = np.random.default_rng(0).choice(differences, (20_000, len(differences)))
    low, high = np.percentile(draws.mean(1), [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)


def ablation(rows: list[Row], out: pathlib.Path) -> str:
    """Orthogonal against plain Jacobian norm, paired by seed, at the same weight."""
    pairs: dict[tuple[str, float], dict[int, Row]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["method"] in ("orthogonal", "jacobian") and "/n" not in row["key"]:
            pairs[row["task"], row["weight"]][row["seed"]][row["method"]] = epochs_of(row)
    lines, relative = [], {}
    for (task, weight), seeds in pairs.items():
        both = np.array([[e["orthogonal"], e["jacobian"]] for e in seeds.values() if len(e) == 2])
        if len(both) < 5:
            continue
        kept = both[np.isfinite(both).all(1)]
        never = [str(int(np.isinf(both[:, i]).sum())) for i in (0, 1)]
        cells = ["-"] * 3
        if len(kept) >= 5:
            mean, low, high = bootstrap(kept[:, 0] - kept[:, 1])
            percent = np.array([mean, low, high]) * 100 / kept[:, 1].mean()
            relative[f"{TASKS[task].title} ({len(kept)} seeds)"] = tuple(percent)
            cells = [f"{kept[:, i].mean():.4g}" for i in (0, 1)]
            cells.append(f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]")
        lines.append([TASKS[task].title, f"{weight:g}", str(len(both)), *never, *cells])
    if not lines:
        return "No runs yet.\n"
    header = ["task", "weight", "seeds", "orthogonal never", "Jacobian never"]
    header += ["orthogonal, mean epochs", "Jacobian, mean epochs", "difference, 95% interval"]
    text = table(header, lines)
    if relative:
        figures.ablation(relative, out / "ablation.png")
        text += "\n![ablation](ablation.png)\n"
    return text


def phase(rows: list[Row], out: pathlib.Path) -> str:
    """The map of training-set size and weight, on sparse parity."""
    cells: dict[tuple[int, float], list[float]] = defaultdict(list)
    caps = [0]
    for row in rows:
        if row["task"] == "parity" and "/n" in row["key"]:
            cells[row["samples"], row["weight"]].append(epochs_of(row))
            caps.append(row["cap"])
    if not cells:
        return "No runs yet.\n"
    middle = {k: statistics.median(v) for k, v in cells.items()}
    figures.phase_map(middle, max(caps), out / "phase.png")
    counts = sorted({len(v) for v in cells.values()})
    return f"![phase map](phase.png)\n\nSeeds per cell: {' or '.join(map(str, counts))}.\n"


def sweep(rows: list[Row], task: str) -> str:
    """Every weight that was tried on a task."""
    groups: dict[tuple[str, float], list[float]] = defaultdict(list)
    for row in rows:
        if row["task"] == task and "/n" not in row["key"]:
            groups[row["method"], row["weight"]].append(epochs_of(row))
    lines = []
    for (method, weight), each in sorted(groups.items()):
        grokked = f"{sum(map(math.isfinite, each))} of {len(each)}"
        shown = f"{weight:g}" if weight else ""
        middle = number(statistics.median(each))
        lines.append([METHODS[method].title, shown, grokked, middle, spread(each)])
    return table(["method", "weight", "grokked", "median epochs", "mean ± sd"], lines)


def theory(path: pathlib.Path) -> str:
    """The three checks; mean and standard deviation over their seeds."""
    if not path.exists():
        return "Not run yet.\n"
    results = json.loads(path.read_text())
    text = ""
    for name, runs in results.items():
        text += f"### {name.replace('theorem', 'Theorem ')} ({len(runs)} seeds)\n\n"
        text += f"{getattr(checks, name).__doc__}\n\n"
        numbers = checks.summary(runs)
        nested = {k: v for k, v in numbers.items() if isinstance(v, dict)}
        flat = [[k, "{:.3g} ± {:.1g}".format(*v)] for k, v in numbers.items() if k not in nested]
        if flat:
            text += table(["", "mean ± sd"], flat) + "\n"
        if nested:
            columns = list(next(iter(nested.values())))
            lines = [
                [k, *("{:.3g} ± {:.1g}".format(*v[c]) for c in columns)] for k, v in nested.items()
            ]
            text += table(["", *columns], lines) + "\n"
    return text


def write(runs: pathlib.Path, out: pathlib.Path, tasks: list[str]) -> pathlib.Path:
    """``paper.md`` and its figures."""
    rows = [r for r in read(runs).values() if r["seed"] < FIRST_TUNING_SEED]
    present = [t for t in tasks if _of_task(rows, t)]
    notes = (pathlib.Path(__file__).parent / "notes.md").read_text()
    text = notes
    text += "\n## Epochs and processor time to grok\n\n"
    for task in present:
        text += compare(rows, task) + "\n"
        traced = [r for g in _of_task(rows, task).values() for r in g if r["history"]]
        if traced:
            figures.curves(traced, out / f"curves_{task}.png")
            text += f"![curves](curves_{task}.png)\n\n"
    text += "## The claims, one by one\n\n" + verdicts(rows, present)
    text += "\n## Does the geometry rise at the grok?\n\n" + rise(rows, present)
    for path in sorted(out.glob("regions_*.png")):
        text += f"\n![linear regions]({path.name})\n"
    text += "\n## How much does the projection do?\n\n" + ablation(rows, out)
    text += "\n## Phase map\n\n" + phase(rows, out)
    tokens = sweep(rows, "tokens") if _of_task(rows, "tokens") else "No runs yet.\n"
    text += "\n## Tokens\n\n" + tokens
    text += "\n## The theory\n\n" + theory(out / "theory.json")
    path = out / "paper.md"
    path.write_text(text)
    return path
