"""Recursive feature alignment machines as scikit-learn estimators."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from normalign import _rfam_fit, _rfam_io
from normalign._checks import check_choice, check_count, check_positive
from normalign._rfam_memory import check_memory
from normalign._threads import thread_count, torch_threads

Array = NDArray[Any]
Self = TypeVar("Self", bound="_RFAM")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Rows of a prediction handled at once: the kernel block then stays within this many bytes.
PREDICT_BYTES = 64 * 2**20


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


class _RFAM(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share."""

    machine_: _rfam_fit.Machine

    def __init__(
        self,
        alpha: float = 0.0,
        reg: float = 1e-3,
        bandwidth: float = 10.0,
        kernel: str | float = "laplace",
        n_iter: int = 5,
        tol: float | None = None,
        validation_fraction: float | None = None,
        agop_samples: int | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
        memory_limit: float | str | None = None,
    ) -> None:
        self.alpha = alpha
        self.reg = reg
        self.bandwidth = bandwidth
        self.kernel = kernel
        self.n_iter = n_iter
        self.tol = tol
        self.validation_fraction = validation_fraction
        self.agop_samples = agop_samples
        self.dtype = dtype
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        self.memory_limit = memory_limit

    # --- fitted state

    @property
    def feature_matrix_(self) -> Array:
        """The learned feature matrix M, shape ``(d, d)``, trace ``d``."""
        return self._fitted("feature_matrix_").feature_matrix.numpy()

    @property
    def dual_coef_(self) -> Array:
        """Coefficients of the training rows, shape ``(n, c)``."""
        return self._fitted("dual_coef_").dual_coef.numpy()

    @property
    def feature_importances_(self) -> Array:
        """The diagonal of M: how strongly each feature moves the prediction."""
        factor = self._fitted("feature_importances_").factor
        return factor.square().sum(dim=1).numpy()

    @property
    def jitter_(self) -> float:
        """What was added to the diagonal to make the kernel matrix positive definite; 0 mostly."""
        return float(self._fitted("jitter_").jitter)

    def _fitted(self, attribute: str) -> _rfam_fit.Machine:
        if "machine_" not in vars(self):
            msg = f"{type(self).__name__} has no {attribute} before fit"
            raise AttributeError(msg)
        return self.machine_

    # --- fit

    def _check_parameters(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            msg = f"alpha must lie between 0 (RFAM) and 1 (RFM), got {self.alpha!r}"
            raise ValueError(msg)
        if not 0.0 <= self.reg < float("inf"):
            msg = f"reg must be non-negative and finite, got {self.reg!r}"
            raise ValueError(msg)
        check_positive("bandwidth", self.bandwidth)
        check_count("n_iter", self.n_iter)
        if isinstance(self.kernel, str):
            check_choice("kernel", self.kernel, ("laplace", "gaussian"))
        elif not 0.0 < self.kernel <= 2.0:
            msg = f"kernel must be a name or an exponent in (0, 2], got {self.kernel!r}"
            raise ValueError(msg)
        if self.tol is not None:
            check_positive("tol", self.tol)
        if self.agop_samples is not None:
            check_count("agop_samples", self.agop_samples)
        if self.validation_fraction is not None and not 0.0 < self.validation_fraction < 1.0:
            msg = f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}"
            raise ValueError(msg)
        if self.dtype is not None:
            check_choice("dtype", str(np.dtype(self.dtype)), tuple(DTYPES))

    def _numpy_dtype(self, X: Any) -> type | np.dtype[Any] | list[type]:
        """What validation converts to: the asked dtype; else float32 stays, the rest is float64."""
        return np.dtype(self.dtype) if self.dtype is not None else [np.float64, np.float32]

    def _tensor(self, values: Array, like: Array) -> Tensor:
        # A copy where the array is not writable: torch warns about such memory.
        values = np.ascontiguousarray(values, dtype=like.dtype)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _fit_machine(
        self,
        X: Array,
        targets: Array,
        sample_weight: ArrayLike | None,
        validation: tuple[Array, Array] | None,
        stratify: Array | None,
    ) -> None:
        """Fits on checked data; ``targets`` holds one column per output.

        ``validation`` holds checked features, and labels or targets as ``_validation_score``
        takes them.
        """
        generator = check_random_state(self.random_state)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(
                sample_weight, X, dtype=X.dtype, ensure_non_negative=True
            )
            kept = np.flatnonzero(weight > 0)
            if kept.size == 0:
                msg = "sample_weight must be positive for at least one row, got only zeros"
                raise ValueError(msg)
            if kept.size < len(weight):  # a weight of 0 means that the row isn't there
                X, targets, weight = X[kept], targets[kept], weight[kept]
                stratify = None if stratify is None else stratify[kept]
        if validation is None and self.validation_fraction is not None:
            X, targets, weight, validation = self._split(X, targets, weight, stratify, generator)
        check_memory(
            len(X), X.shape[1], targets.shape[1], X.dtype.itemsize, self.memory_limit
        )
        seed = int(generator.randint(2**31 - 1))
        evaluate = None if validation is None else self._evaluator(*validation, X)
        with torch_threads(thread_count(self.n_jobs)), torch.no_grad():
            result = _rfam_fit.fit(
                self._tensor(X, X).to(self.device),
                self._tensor(targets, X).to(self.device),
                alpha=float(self.alpha),
                reg=float(self.reg),
                bandwidth=float(self.bandwidth),
                kernel=self.kernel,
                n_iter=self.n_iter,
                tol=self.tol,
                sample_weight=None if weight is None else self._tensor(weight, X).to(self.device),
                agop_samples=self.agop_samples,
                generator=torch.Generator().manual_seed(seed),
                evaluate=evaluate,
            )
        # CPU tensors: a pickle then loads where there is no GPU.
        self.machine_ = _moved(result.machine, "cpu")
        self.history_ = list(result.history)
        self.best_iter_ = int(result.best_iter)
        if self.verbose:
            for entry in self.history_:
                print(f"[{type(self).__name__}] " + _line(entry))

    def _split(
        self,
        X: Array,
        targets: Array,
        weight: Array | None,
        stratify: Array | None,
        generator: np.random.RandomState,
    ) -> tuple[Array, Array, Array | None, tuple[Array, Array]]:
        """Takes ``validation_fraction`` of the rows out of the training set."""
        rows = np.arange(len(X))
        try:
            if stratify is not None and np.bincount(stratify).min() < 2:
                stratify = None  # a class with one row can't be in both parts
            train, held_out = train_test_split(
                rows,
                test_size=self.validation_fraction,
                random_state=generator,
                stratify=stratify,
            )
        except ValueError:
            train, held_out = train_test_split(
                rows, test_size=self.validation_fraction, random_state=generator
            )
        weight = None if weight is None else weight[train]
        return X[train], targets[train], weight, (X[held_out], targets[held_out])

    def _evaluator(self, X_val: Array, targets: Array, like: Array) -> Any:
        points = self._tensor(X_val, like).to(self.device)

        def evaluate(machine: _rfam_fit.Machine) -> float:
            outputs = machine.decision(points, _chunk(machine)).cpu().numpy()
            return self._validation_score(outputs, targets)

        return evaluate

    def _validation_score(self, outputs: Array, targets: Array) -> float:
        raise NotImplementedError

    def _check_validation(self, X_val: Any, y_val: Any) -> tuple[Array, Any] | None:
        if (X_val is None) != (y_val is None):
            missing = "y_val" if y_val is None else "X_val"
            msg = f"X_val and y_val must be given together, got no {missing}"
            raise ValueError(msg)
        if X_val is None:
            return None
        X_val = self._check_rows(X_val)
        check_consistent_length(X_val, y_val)
        return X_val, y_val

    # --- predict

    def _check_rows(self, X: Any) -> Array:
        return np.asarray(validate_data(self, X, reset=False, dtype=self._numpy_dtype(X)))

    def _outputs(self, X: Any, chunk: int | None = None) -> Array:
        """The machine's raw outputs, shape ``(m, c)``."""
        check_is_fitted(self)
        X = self._check_rows(X)
        machine = self.machine_
        # Fitted in float32, asked in float64 (or the other way): the fitted dtype decides.
        points = self._tensor(X, np.empty(0, dtype=machine.points.numpy().dtype))
        device = self.device if _available(self.device) else "cpu"
        machine = _moved(machine, device)
        with torch_threads(thread_count(self.n_jobs)), torch.no_grad():
            outputs = machine.decision(points.to(device), chunk or _chunk(machine))
        return np.asarray(outputs.cpu().numpy())

    # --- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted model as a NumPy ``npz`` file; ``load`` reads it back.

        The file holds numbers and text only, and reading it runs no code. A ``random_state`` that
        is not an integer is not kept.

        Args:
            path: The file, which is replaced whole or not at all.

        Raises:
            NotFittedError: the model isn't fitted.
        """
        check_is_fitted(self)
        _rfam_io.save(self, path)

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Reads a model that ``save`` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: the file is not a saved model of this class, or of a newer version.
        """
        return _rfam_io.load(cls, path)

    def __sklearn_is_fitted__(self) -> bool:
        return "machine_" in vars(self)


class RFAMClassifier(ClassifierMixin, _RFAM):  # type: ignore[misc]
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
        X, y = validate_data(self, X, y, dtype=self._numpy_dtype(X))
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        one_hot = np.eye(len(self.classes_), dtype=X.dtype)[codes]
        validation = self._check_validation(X_val, y_val)
        if validation is not None:
            labels = column_or_1d(validation[1])
            # One column per known class; a label that was never seen leaves its row empty.
            validation = validation[0], (labels[:, None] == self.classes_).astype(X.dtype)
        self._fit_machine(X, one_hot, sample_weight, validation, codes)
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


class RFAMRegressor(RegressorMixin, _RFAM):  # type: ignore[misc]
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
        X, y = validate_data(
            self, X, y, dtype=self._numpy_dtype(X), multi_output=True, y_numeric=True
        )
        self._single_output = y.ndim == 1
        targets = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
            weight = weight if weight.sum() > 0 else None  # _fit_machine refuses such weights
        self.intercept_ = np.average(targets, axis=0, weights=weight)
        validation = self._check_validation(X_val, y_val)
        if validation is not None:
            expected = check_array(validation[1], ensure_2d=False, dtype=np.float64)
            validation = validation[0], self._centred(expected.reshape(len(expected), -1))
        self._fit_machine(X, self._centred(targets), sample_weight, validation, None)
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


def _chunk(machine: _rfam_fit.Machine) -> int:
    row = max(1, machine.points.shape[0]) * machine.points.element_size()
    return max(1, PREDICT_BYTES // row)


def _available(device: str) -> bool:
    return not str(device).startswith("cuda") or torch.cuda.is_available()


def _moved(machine: _rfam_fit.Machine, device: str) -> _rfam_fit.Machine:
    """The machine with its tensors on ``device``; itself when they already are."""
    tensors = {
        field.name: value.to(device)
        for field in dataclasses.fields(machine)
        if isinstance(value := getattr(machine, field.name), Tensor)
    }
    return dataclasses.replace(machine, **tensors)


def _line(entry: Any) -> str:
    values = entry if isinstance(entry, dict) else vars(entry)
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
