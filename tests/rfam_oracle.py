"""RFAM written down in NumPy float64, straight from the equations, for small data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import make_classification

Array = NDArray[np.float64]


def distances(x: Array, z: Array, M: Array) -> Array:
    difference = x[:, None, :] - z[None, :, :]
    squared = np.einsum("ijd,de,ije->ij", difference, M, difference)
    return np.sqrt(np.maximum(squared, 0.0))


def jacobians(x: Array, z: Array, coef: Array, M: Array, bandwidth: float) -> Array:
    """(m, c, d); a point at distance 0 contributes nothing."""
    D = distances(x, z, M)
    W = np.divide(np.exp(-D / bandwidth), D, out=np.zeros_like(D), where=D > 1e-9)
    difference = x[:, None, :] - z[None, :, :]
    return -np.einsum("ij,jk,ijd,de->ike", W, coef, difference, M) / bandwidth


def scaled(M: Array) -> Array:
    trace = np.trace(M)
    return M * (len(M) / trace) if trace > 0 else M


def fit(
    x: Array,
    y: Array,
    alpha: float,
    reg: float,
    bandwidth: float,
    n_iter: int,
    weight: Array | None = None,
) -> tuple[Array, Array]:
    """M and the coefficients of the last solve."""
    w = np.ones(len(x)) if weight is None else np.asarray(weight, dtype=np.float64)
    centred = x - w @ x / w.sum()
    covariance = (centred * w[:, None]).T @ centred / max(w.sum() - 1, 1)
    M = scaled((1 - alpha) * covariance + alpha * np.eye(x.shape[1]))
    for iteration in range(n_iter):
        K = np.exp(-distances(x, x, M) / bandwidth)
        coef = np.linalg.solve(K + reg * np.diag(1 / w), y)
        if iteration + 1 < n_iter:
            J = jacobians(x, x, coef, M, bandwidth)
            M = scaled(np.einsum("i,ikd,ike->de", w, J, J))
    return M, coef


def predict(x: Array, z: Array, coef: Array, M: Array, bandwidth: float) -> Array:
    return np.exp(-distances(x, z, M) / bandwidth) @ coef


def blobs(n=120, d=5, classes=3, seed=0):
    """Points of a few Gaussian classes."""
    X, y = make_classification(
        n, d, n_informative=d - 1, n_redundant=0, n_classes=classes, random_state=seed
    )
    return X, y
