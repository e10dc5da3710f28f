"""The picture that explains grokking: linear regions on a plane through three training points."""

from __future__ import annotations

import copy
import pathlib

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

import normalign
from grokking.methods import METHODS
from grokking.runner import Spec, Training
from grokking.tasks import TASKS


def snapshots(training: Training, max_epochs: int = 20_000) -> dict[str, nn.Module]:
    """The network at memorisation, at the grok, and after half as many epochs again."""
    found: dict[str, nn.Module] = {}
    epoch, last = 0, max_epochs
    while epoch < last:
        training.epoch()
        epoch += 1
        measured = training.measure()
        moment = f"epoch {epoch}: test {measured['test']:.0f}%"
        if not found and measured["train"] > training.task.train_above:
            found[f"memorised, {moment}"] = copy.deepcopy(training.setup.model)
        if len(found) == 1 and training.passed(measured):
            found[f"grokked, {moment}"] = copy.deepcopy(training.setup.model)
            last = epoch + max(epoch // 2, 50)
    return {**found, f"later, {moment}": training.setup.model}


def patterns(model: nn.Module, points: Tensor) -> Tensor:
    """A number for each point's activation pattern: equal within a linear region."""
    generator = torch.Generator().manual_seed(0)
    code = torch.zeros(len(points), dtype=torch.int64)
    a = points
    with torch.no_grad():
        for layer in model:
            a = layer(a)
            if isinstance(layer, nn.ReLU):
                # A random 62-bit code per unit; sums wrap around, collisions are negligible.
                bits = torch.randint(2**62, (a.shape[1],), generator=generator)
                code += ((a > 0) * bits).sum(1)
    return code


def draw(task_name: str, method: str, seed: int, path: pathlib.Path, size: int = 500) -> None:
    """Regions, boundaries, points and centroids, a panel for each snapshot."""
    training = Training(Spec(task_name, method, seed))
    setup = training.setup
    chosen = torch.stack([setup.x[(setup.y == k).nonzero()[0, 0]] for k in (0, 1, 2)])
    # The plane through the three points, in an orthonormal frame around their mean.
    centre = chosen.mean(0)
    frame = torch.linalg.svd(chosen - centre, full_matrices=False).Vh[:2]
    flat = (chosen - centre) @ frame.T
    reach = 1.6 * flat.abs().max().item()
    ticks = torch.linspace(-reach, reach, size, dtype=chosen.dtype)
    grid = torch.cartesian_prod(ticks, ticks)
    models = snapshots(training)
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 6), squeeze=False)
    for axis, (title, model) in zip(axes[0], models.items(), strict=True):
        parts = [
            (patterns(model, p), model(p).argmax(1)) for p in (grid @ frame + centre).split(8192)
        ]
        codes = torch.cat([p[0] for p in parts]).view(size, size).T.numpy()
        classes = torch.cat([p[1] for p in parts]).view(size, size).T.numpy()
        edges = np.zeros((size, size), bool)
        edges[:, 1:] |= codes[:, 1:] != codes[:, :-1]
        edges[1:] |= codes[1:] != codes[:-1]
        extent = (-reach, reach, -reach, reach)
        axis.imshow(classes, cmap="Pastel1", vmin=0, vmax=8.99, origin="lower", extent=extent)
        shade = np.ma.masked_where(~edges, edges)
        axis.imshow(shade, cmap="gray_r", vmin=0, vmax=2.6, origin="lower", extent=extent)
        cosines = normalign.centroid_alignment(model, chosen)
        centroids = normalign.centroid(model, chosen)
        # Directions matter: each centroid is drawn at the length of its point.
        lengths = chosen.norm(dim=1, keepdim=True) / centroids.norm(dim=1, keepdim=True)
        at = (centroids.detach() * lengths - centre) @ frame.T
        for k, colour in enumerate(("tab:blue", "tab:red", "tab:green")):
            axis.plot(*flat[k], "o", color=colour, mec="black", ms=9)
            axis.plot(*at[k], "*", color=colour, mec="black", ms=15)
            axis.plot(*zip(flat[k], at[k], strict=True), color=colour, lw=1, ls="--")
        regions = len(np.unique(codes))
        shown = ", ".join(f"{c:.2f}" for c in cosines.tolist())
        axis.set_title(
            f"{title}\n{regions} regions; cos of centroid and point: {shown}", fontsize=10
        )
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
    figure.suptitle(
        f"{TASKS[task_name].title}, {METHODS[method].title}: circles are training points, "
        "stars their centroids at the points' length, projected onto the plane"
    )
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=70)
    plt.close(figure)
