"""Recursive feature alignment machines as scikit-learn estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    column_or_1d,
    validate_data,
)

from normalign._rfam_base import Array, RFAMBase


def simplex_projection(scores: Array) -> Array:
    """The closest point of the probability simplex, row by row.

    The order of the scores is kept, so the most probable class is the predicted one.

    Args:
        scores: Shape ``(m, c)``.

    Returns:
        Shape ``(m, c)``; rows are non-negative and sum to 1.
    """
    ordered = -np.sort(-scores, axis=1)
    excess = (np.cumsum(ordered, axis=1) - 1.0) / np.arange(1, scores.shape[1] + 1)
    support = np.maximum((ordered > excess).sum(axis=1), 1)
    shift = np.take_along_axis(excess, support[:, None] - 1, axis=1)
    clipped = np.maximum(scores - shift, 0.0)
    return np.asarray(clipped / clipped.sum(axis=1, keepdims=True))


class RFAMClassifier(ClassifierMixin, RFAMBase):  # type: ignore[misc]
    """Recursive feature alignment machine for classification.

    Alternates kernel ridge regression to the one-hot labels, with the kernel
    ``exp(-|x - z|_M / bandwidth)``, and the average gradient outer product (AGOP),
    ``M <- mean_i J(x_i)^T J(x_i)`` scaled to trace ``d``. It starts from
    ``M = (1 - alpha) Cov(X) + alpha I``: alpha 0 is RFAM, alpha 1 the recursive feature machine
    (RFM). See https://arxiv.org/abs/2605.08464.

    Args:
        alpha: Share of the identity in the first M, between 0 (RFAM) and 1 (RFM).
        reg: Ridge added to the diagonal of the kernel matrix.
        bandwidth: Length of the kernel, in units of the features.
        kernel: ``"laplace"``, ``"gaussian"``, or the exponent ``q`` in ``(0, 2]`` of
            ``exp(-(|x - z|_M / bandwidth)^q)``.
        n_iter: Number of solves; M is updated between them. 1 keeps the first M.
        tol: Stops when the relative change of M falls below it; ``None`` never does.
        validation_fraction: Share of the rows set aside to choose the iteration, if no ``X_val``
            is given. ``None`` keeps the last iteration.
        agop_samples: Rows drawn with replacement for the AGOP, as published; ``None`` takes all.
        dtype: ``"float32"`` (half the memory, twice the speed) or ``"float64"``; ``None`` keeps
            float32 input and takes float64 for the rest.
        device: Where to compute, as torch names it. The fitted state is kept on the CPU.
        n_jobs: Threads; ``None`` is torch's setting, -1 every core.
        random_state: Seed of the split and of the AGOP sample.
        verbose: Prints the history when positive.
        memory_limit: Bytes, or text such as ``"8GB"``; a fit that needs more is refused before
            anything is allocated. ``None`` is 90% of the memory available.

    Attributes:
        classes_: The labels, sorted.
        feature_matrix_: M, shape ``(d, d)``.
        dual_coef_: Coefficients, shape ``(n, c)``.
        feature_importances_: Diagonal of M, shape ``(d,)``.
        history_: One dictionary per iteration: validation score, change of M, jitter, seconds.
        best_iter_: The iteration that was kept, from 0.
        jitter_: What the kernel matrix's diagonal needed beyond ``reg``; 0 in ordinary cases.
        machine_: The kernel machine, on CPU tensors.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = RFAMClassifier().fit(X, y)
        >>> model.score(X, y) > 0.9
        True
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> RFAMClassifier:
        """Fits the machine.

        Args:
            X: Features, shape ``(n, d)``, finite numbers; a DataFrame's column names are kept and
                checked later.
            y: Labels, shape ``(n,)``: integers, booleans or strings.
            sample_weight: Non-negative weights, shape ``(n,)``. An integer weight equals that many
                copies of the row, 0 leaves it out.
            X_val: Rows that choose the iteration, shape ``(m, d)``.
            y_val: Their labels; one that is not in ``y`` counts as an error.

        Returns:
            The estimator itself.

        Raises:
            ValueError: a parameter is out of range, or the data is not finite or of unequal
                length.
            MemoryError: the kernel matrix would not fit; the message says what would.
        """
        self._check_parameters()
        checked = validate_data(self, X, y, dtype=self._numpy_dtype())
        rows: Array = checked[0]
        check_classification_targets(checked[1])
        self.classes_, codes = np.unique(checked[1], return_inverse=True)
        one_hot = np.eye(len(self.classes_), dtype=rows.dtype)[codes]
        validation = self._check_validation(X_val, y_val)
        if validation is not None:
            labels = column_or_1d(validation[1])
            # One column per known class; a label that was never seen leaves its row empty.
            validation = validation[0], (labels[:, None] == self.classes_).astype(rows.dtype)
        self._fit_machine(rows, one_hot, sample_weight, validation, codes)
        return self

    def _validation_score(self, outputs: Array, targets: Array) -> float:
        hits = np.take_along_axis(targets, outputs.argmax(axis=1)[:, None], axis=1)
        return float(hits.mean())

    def decision_function(self, X: ArrayLike) -> Array:
        """Scores of the classes.

        Args:
            X: Features, shape ``(m, d)``.

        Returns:
            Shape ``(m, c)``, one column per class; with two classes shape ``(m,)``, the second
            class's score minus the first's.
        """
        outputs = self._outputs(X)
        if outputs.shape[1] == 2:
            return np.asarray(outputs[:, 1] - outputs[:, 0])
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def predict_proba(self, X: ArrayLike) -> Array:
        """Class probabilities: the scores, projected onto the probability simplex.

        The machine regresses on one-hot labels, so its outputs estimate probabilities; the
        projection is the smallest change that makes them non-negative with sum 1.

        Args:
            X: Features, shape ``(m, d)``.

        Returns:
            Shape ``(m, c)``.
        """
        return simplex_projection(self._outputs(X))

    def predict(self, X: ArrayLike) -> Array:
        """The label with the highest score.

        Args:
            X: Features, shape ``(m, d)``.

        Returns:
            Labels, shape ``(m,)``.
        """
        outputs = self._outputs(X)
        return np.asarray(self.classes_[outputs.argmax(axis=1)])


class RFAMRegressor(RegressorMixin, RFAMBase):  # type: ignore[misc]
    """Recursive feature alignment machine for regression, with one target or several.

    The parameters and fitted attributes are those of ``RFAMClassifier``, without ``classes_``.
    The targets are centred first; ``intercept_`` is added back. With several targets one M serves
    all, and a target's share in it grows with its variance: scale them to what each should weigh.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 3))
        >>> model = RFAMRegressor(bandwidth=3.0).fit(X, X[:, 0] ** 2)
        >>> int(model.feature_importances_.argmax())
        0
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> RFAMRegressor:
        """Fits the machine.

        Args:
            X: Features, shape ``(n, d)``, finite numbers.
            y: Targets, shape ``(n,)`` or ``(n, c)``.
            sample_weight: Non-negative weights, shape ``(n,)``. An integer weight equals that many
                copies of the row, 0 leaves it out.
            X_val: Rows that choose the iteration, by R^2, shape ``(m, d)``.
            y_val: Their targets.

        Returns:
            The estimator itself.

        Raises:
            ValueError: a parameter is out of range, or the data is not finite or of unequal
                length.
            MemoryError: the kernel matrix would not fit; the message says what would.
        """
        self._check_parameters()
        checked = validate_data(
            self, X, y, dtype=self._numpy_dtype(), multi_output=True, y_numeric=True
        )
        rows: Array = checked[0]
        targets = np.asarray(checked[1], dtype=np.float64)
        self._single_output = targets.ndim == 1
        targets = targets.reshape(len(rows), -1)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, rows, dtype=np.float64)
            weight = weight if weight.sum() > 0 else None  # _fit_machine refuses such weights
        self.intercept_ = np.average(targets, axis=0, weights=weight)
        validation = self._check_validation(X_val, y_val)
        if validation is not None:
            expected = check_array(validation[1], ensure_2d=False, dtype=np.float64)
            validation = validation[0], self._centred(expected.reshape(len(expected), -1))
        self._fit_machine(rows, self._centred(targets), sample_weight, validation, None)
        return self

    def _centred(self, targets: Array) -> Array:
        if targets.shape[1] != len(self.intercept_):
            expected = len(self.intercept_)
            msg = f"y_val must have {expected} targets to match y, got {targets.shape[1]}"
            raise ValueError(msg)
        return np.asarray(targets - self.intercept_)

    def _validation_score(self, outputs: Array, targets: Array) -> float:
        residual = float(np.square(targets - outputs).sum())
        spread = float(np.square(targets - targets.mean(axis=0)).sum())
        return 1.0 - residual / spread if spread > 0 else -residual

    def predict(self, X: ArrayLike) -> Array:
        """Predicted targets.

        Args:
            X: Features, shape ``(m, d)``.

        Returns:
            Shape ``(m,)``, or ``(m, c)`` when fitted to several targets.
        """
        outputs = self._outputs(X) + self.intercept_
        return np.asarray(outputs[:, 0] if self._single_output else outputs)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
