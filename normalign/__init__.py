"""GrokAlign and RFAM: fast compiled kernels that make classifiers normal-aligned."""

from normalign._config import show_config
from normalign.grokalign import grokalign
from normalign.loss import GrokAlignLoss
from normalign.orthogonal_projection import orthogonal_projection

__all__ = ["GrokAlignLoss", "grokalign", "orthogonal_projection", "show_config"]
