"""Plain-torch definitions of every operator: any device, any float dtype, and the fallback."""

from normalign.reference.grokalign import grokalign, root
from normalign.reference.orthogonal_projection import orthogonal_projection

__all__ = ["grokalign", "orthogonal_projection", "root"]
