"""The report: tables and figures from the file of runs, and from nothing else."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections import defaultdict
from typing import Any

import numpy as np
from scipy import stats

from grokking import figures
from grokking import theory as checks
from grokking.claims import (
    bars,
    bound,
    epochs_of,
    gaps,
    geometry,
    medians,
    number,
    of_task,
    order,
    rise,
    short,
    table,
    title,
)
from grokking.runner import read
from grokking.tasks import TASKS

Row = dict[str, Any]
FIRST_TUNING_SEED = 100  # seeds from here on chose weights and rates; no table counts them
PAPER_SPEEDUP = {"parity": "19.76x"}  # what the paper states for GrokAlign over the baseline


def spread(values: list[float]) -> str:
    """Mean and standard deviation of the runs that grokked."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "-"
    deviation = statistics.stdev(finite) if len(finite) > 1 else math.nan
    return number(statistics.mean(finite)) + (f" ± {deviation:.2g}" if len(finite) > 1 else "")


def compare(rows: list[Row], task: str) -> str:
    """The task's table: epochs and processor time to grok, by method."""
    groups = of_task(rows, task)
    epochs, seconds = medians(groups, "grokked"), medians(groups, "cpu")
    caps = sorted({r["cap"] for g in groups.values() for r in g})
    base = epochs.get("baseline", math.nan)
    lines = []
    for name, group in groups.items():
        each = [epochs_of(r) for r in group]
        gain = "-"
        if name != "baseline" and math.isfinite(epochs[name]) and not math.isnan(base):
            known = bound(groups["baseline"]) if math.isinf(base) else base
            gain = f"{'> ' * math.isinf(base)}{known / max(epochs[name], 1):.3g}x"
        weight = f"{group[0]['weight']:g}" if group[0]["weight"] else ""
        grokked = f"{sum(map(math.isfinite, each))} of {len(each)}"
        times = [number(epochs[name]), spread(each), gain, number(seconds[name])]
        lines.append([title(name), weight, grokked, *times])
    header = ["method", "weight", "grokked", "median epochs", "mean ± sd", "speed-up", "CPU s"]
    text = f"### {TASKS[task].title}\n\n{table(header, lines)}"
    text += f"\nRuns stop at {' or '.join(map(str, caps))} epochs."
    if task in PAPER_SPEEDUP:
        text += f" The paper states {PAPER_SPEEDUP[task]} for GrokAlign."
    return text + "\n"


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95% interval by Student's t."""
    mean, count = differences.mean(), len(differences)
    half = stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return float(mean), float(mean - half), float(mean + half)


def ablation(rows: list[Row], out: pathlib.Path) -> str:
    """Orthogonal against plain Jacobian norm, paired by seed, at the same weight."""
    pairs: dict[tuple[str, float], dict[int, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        if row["method"] in ("orthogonal", "jacobian") and "/n" not in row["key"]:
            pairs[row["task"], row["weight"]][row["seed"]][row["method"]] = epochs_of(row)
    lines, relative, verdicts = [], {}, []
    for (task, weight), seeds in pairs.items():
        both = np.array([[e["orthogonal"], e["jacobian"]] for e in seeds.values() if len(e) == 2])
        kept = both[np.isfinite(both).all(1)] if len(both) else both
        if len(kept) < 3:
            continue
        name = TASKS[task].title
        mean, low, high = interval(kept[:, 0] - kept[:, 1])
        percent = np.array([mean, low, high]) * 100 / kept[:, 1].mean()
        relative[f"{name} ({len(kept)} seeds)"] = tuple(percent)
        never = [str(int(np.isinf(both[:, i]).sum())) for i in (0, 1)]
        cells = [f"{kept[:, i].mean():.4g}" for i in (0, 1)]
        cells.append(f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]")
        lines.append([name, f"{weight:g}", str(len(both)), *never, *cells])
        word = "fewer" if high < 0 else "more" if low > 0 else "no clearly different number of"
        verdicts.append(f"- {name}: {word} epochs with the projection ({percent[0]:+.1f}%).")
    if not lines:
        return "No runs yet.\n"
    figures.ablation(relative, out / "ablation.png")
    header = ["task", "weight", "seeds", "orthogonal never", "Jacobian never"]
    header += ["orthogonal, mean epochs", "Jacobian, mean epochs", "difference, 95% interval"]
    text = table(header, lines) + "\nMeans and interval (Student's): seeds at which both grok."
    return text + "\n\n" + "\n".join(verdicts) + "\n\n![ablation](ablation.png)\n"


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
    samples, weights = (sorted({key[i] for key in cells}) for i in (0, 1))
    shown = {k: f"> {max(caps)}" if math.isinf(v) else number(v) for k, v in middle.items()}
    lines = [[f"{w:g}", *(shown.get((n, w), "not run") for n in samples)] for w in weights]
    text = table(["weight", *(f"{n} points" for n in samples)], lines)
    text += f"\nMedian epochs to grok; seeds per cell: {' or '.join(map(str, counts))}.\n"
    return text + "\n![phase map](phase.png)\n"


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
        lines.append([title(method), shown, grokked, middle, spread(each)])
    return table(["method", "weight", "grokked", "median epochs", "mean ± sd"], lines)


def tokens(rows: list[Row], out: pathlib.Path) -> str:
    """Every weight, whether the penalty shortens grokking, and the geometry through training."""
    groups = of_task(rows, "tokens")
    if not groups:
        return "No runs yet.\n"
    base, lines = {r["seed"]: epochs_of(r) for r in groups.get("baseline", [])}, []
    for method in [m for m in groups if m != "baseline"]:
        pairs = [(epochs_of(r), base[r["seed"]]) for r in groups[method] if r["seed"] in base]
        earlier = sum(a < b for a, b in pairs)
        shown = ", ".join(f"{number(a)} against {number(b)}" for a, b in pairs)
        word = f"earlier than the baseline on {earlier} of {len(pairs)} seeds ({shown})"
        lines.append(f"- {title(method)} at weight {groups[method][0]['weight']:g}: {word}.")
    text = sweep(rows, "tokens") + "\n" + "\n".join(lines) + "\n\n" + rise(rows, ["tokens"])
    traced = [r for g in groups.values() for r in g if r["history"]]
    if traced:
        figures.curves(traced, out / "curves_tokens.png")
        text += "\n![curves](curves_tokens.png)\n"
    return text


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


def costs(path: pathlib.Path) -> str:
    """Milliseconds of an epoch, and how many plain epochs that is."""
    if not path.exists():
        return "Not measured yet.\n"
    measured = json.loads(path.read_text())
    methods = list(next(iter(measured.values())))
    lines = [
        [TASKS[task].title, *(f"{c[m]:.3g} ({c[m] / c['baseline']:.2g}x)" for m in methods)]
        for task, c in measured.items()
    ]
    return table(["", *map(title, methods)], lines)


def write(runs: pathlib.Path, out: pathlib.Path, tasks: list[str]) -> pathlib.Path:
    """``paper.md`` and its figures."""
    rows = [r for r in read(runs).values() if r["seed"] < FIRST_TUNING_SEED]
    present = [t for t in tasks if of_task(rows, t)]
    notes, *parts = (pathlib.Path(__file__).parent / "notes.md").read_text().split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    compared = ""
    for task in present:
        compared += compare(rows, task) + "\n"
        traced = [r for g in of_task(rows, task).values() for r in g if r["history"]]
        if traced:
            figures.curves(traced, out / f"curves_{task}.png")
            compared += f"![curves](curves_{task}.png)\n\n"
    pictures = "".join(
        f"\n![linear regions]({p.name})\n" for p in sorted(out.glob("regions_*.png"))
    )
    # Each heading: what stands in notes.md, which has no figures of its own, then the numbers.
    computed = {
        "What the paper's runs gave": short(rows, [t for t in present if t != "xor_full"]),
        "The bars": bars(rows, present),
        "The order of the methods": order(rows, present),
        "Epochs and processor time to grok": compared,
        "Cost of an epoch": costs(out / "cost.json"),
        "Does the geometry rise at the grok?": rise(rows, present) + "\n" + geometry(rows, present),
        "The picture that explains it": pictures,
        "How much does the projection do?": ablation(rows, out),
        "Phase map": phase(rows, out),
        "Tokens": tokens(rows, out),
        "The theory": theory(out / "theory.json"),
        "What was not run": gaps(rows, [t for t in tasks if t != "xor_full"]),
    }
    text = notes
    for heading, content in computed.items():
        said = sections.get(heading, "").strip()
        text += f"\n## {heading}\n\n" + (f"{said}\n\n" if said else "") + content
    path = out / "paper.md"
    path.write_text(text)
    return path
