"""GrokAlign and RFAM: fast compiled kernels that make classifiers normal-aligned."""

import importlib
from typing import TYPE_CHECKING, Any

from normalign import compat
from normalign._config import show_config
from normalign.agop import agop, input_gradient
from normalign.geometry import (
    centroid,
    centroid_alignment,
    effective_rank,
    local_robustness,
    normal_alignment,
)
from normalign.graph import graph_step
from normalign.grokalign import explain, grokalign
from normalign.kernel_solve import kernel_solve
from normalign.laplace_gram import laplace_gram, laplace_matvec
from normalign.loss import GrokAlignLoss
from normalign.orthogonal_projection import orthogonal_projection

if TYPE_CHECKING:
    from normalign._sweep import SweepResult, sweep
    from normalign.rfam import RFAMClassifier, RFAMRegressor
    from normalign.robustness import certified_radius, pgd_attack, robustness_report

__all__ = [
    "GrokAlignLoss",
    "RFAMClassifier",
    "RFAMRegressor",
    "SweepResult",
    "agop",
    "centroid",
    "centroid_alignment",
    "certified_radius",
    "compat",
    "effective_rank",
    "explain",
    "graph_step",
    "grokalign",
    "input_gradient",
    "kernel_solve",
    "laplace_gram",
    "laplace_matvec",
    "local_robustness",
    "normal_alignment",
    "orthogonal_projection",
    "pgd_attack",
    "robustness_report",
    "show_config",
    "sweep",
]

# Imported when first used: what trains networks alone need not wait for scikit-learn.
_LAZY = {
    "RFAMClassifier": "rfam",
    "RFAMRegressor": "rfam",
    "SweepResult": "_sweep",
    "certified_radius": "robustness",
    "pgd_attack": "robustness",
    "robustness_report": "robustness",
    "sweep": "_sweep",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"normalign.{_LAZY[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
