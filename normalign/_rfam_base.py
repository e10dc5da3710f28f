"""What the RFAM estimators share: parameters, fitted state, the call into the fit core."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from normalign import _rfam_fit, _rfam_io
from normalign._checks import check_choice, check_count, check_positive
from normalign._rfam_memory import check_memory
from normalign._threads import thread_count, torch_threads

Array = NDArray[Any]
Self = TypeVar("Self", bound="RFAMBase")
DTYPES = ("float32", "float64")
# Rows of a prediction handled at once: the kernel block then stays within this many bytes.
PREDICT_BYTES = 64 * 2**20


class RFAMBase(BaseEstimator):  # type: ignore[misc]
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
        return self._fitted("feature_matrix_").feature_matrix.numpy(force=True)

    @property
    def dual_coef_(self) -> Array:
        """Coefficients of the training rows, shape ``(n, c)``."""
        return self._fitted("dual_coef_").dual_coef.numpy()

    @property
    def feature_importances_(self) -> Array:
        """The diagonal of M: how strongly each feature moves the prediction."""
        factor = self._fitted("feature_importances_").factor
        return np.asarray(factor.square().sum(dim=1).numpy())

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
            check_choice("dtype", str(np.dtype(self.dtype)), DTYPES)

    def _numpy_dtype(self) -> type | np.dtype[Any] | list[type]:
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
            weight = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
            kept = np.flatnonzero(weight > 0)
            if kept.size == 0:
                msg = "sample_weight must be positive for at least one row, got only zeros"
                raise ValueError(msg)
            if kept.size < len(weight):  # a weight of 0 means that the row isn't there
                X, targets, weight = X[kept], targets[kept], weight[kept]
                stratify = None if stratify is None else stratify[kept]
        if validation is None and self.validation_fraction is not None:
            X, targets, weight, validation = self._split(X, targets, weight, stratify, generator)
        check_memory(len(X), X.shape[1], targets.shape[1], X.dtype.itemsize, self.memory_limit)
        seed = int(generator.randint(2**31 - 1))
        x_val = evaluate = None
        if validation is not None:
            x_val = self._tensor(validation[0], X).to(self.device)
            expected = validation[1]

            def evaluate(outputs: Tensor) -> float:
                return self._validation_score(outputs.cpu().numpy(), expected)

        weights = None if weight is None else self._tensor(weight, X).to(self.device)
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
                sample_weight=weights,
                agop_samples=self.agop_samples,
                generator=torch.Generator().manual_seed(seed),
                evaluate=evaluate,
                x_val=x_val,
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
        return np.asarray(validate_data(self, X, reset=False, dtype=self._numpy_dtype()))

    def _outputs(self, X: Any, chunk: int | None = None) -> Array:
        """The machine's raw outputs, shape ``(m, c)``."""
        check_is_fitted(self)
        X = self._check_rows(X)
        machine = self.machine_
        # Fitted in float32, asked in float64 (or the other way): the fitted dtype decides.
        points = self._tensor(X, machine.mean.numpy())
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

    def __getstate__(self) -> dict[str, Any]:
        """The state without what the machine can compute anew."""
        state: dict[str, Any] = super().__getstate__()
        if "machine_" in state:
            state = {**state, "machine_": _rebuilt(self.machine_, "cpu")}
        return state

    def __sklearn_is_fitted__(self) -> bool:
        return "machine_" in vars(self)


def _chunk(machine: _rfam_fit.Machine) -> int:
    row = max(1, machine.points.shape[0]) * machine.points.element_size()
    return max(1, PREDICT_BYTES // row)


def _available(device: str) -> bool:
    return not str(device).startswith("cuda") or torch.cuda.is_available()


def _moved(machine: _rfam_fit.Machine, device: str) -> _rfam_fit.Machine:
    """The machine with its tensors on ``device``; itself when they already are."""
    same = machine.points.device == torch.device(device)
    return machine if same else _rebuilt(machine, device)


def _rebuilt(machine: _rfam_fit.Machine, device: str) -> _rfam_fit.Machine:
    """A machine of the same parts, on ``device``, without anything cached."""
    tensors: dict[str, Any] = {name: getattr(machine, name).to(device) for name in _rfam_io.TENSORS}
    return _rfam_fit.Machine(
        **tensors, **{name: getattr(machine, name) for name in _rfam_io.SCALARS}
    )


def _line(entry: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in entry.items()
        if value is not None
    )
