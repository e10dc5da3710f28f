"""Plain-torch definitions of every operator: any device, any float dtype, and the fallback."""

from normalign.reference.grokalign import grokalign, penalty_terms, root
from normalign.reference.laplace_gram import (
    agop,
    distances,
    gradient_weights,
    input_gradient,
    jacobian,
    laplace_gram,
    laplace_matvec,
    squared_distances,
)
from normalign.reference.orthogonal_projection import orthogonal_projection

__all__ = [
    "agop",
    "distances",
    "gradient_weights",
    "grokalign",
    "input_gradient",
    "jacobian",
    "laplace_gram",
    "laplace_matvec",
    "orthogonal_projection",
    "penalty_terms",
    "root",
    "squared_distances",
]
