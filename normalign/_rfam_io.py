"""Fitted machines in ``npz`` files: numbers and text, no code."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import zipfile
from typing import Any, TypeVar

import numpy as np
import torch

from normalign import _rfam_fit

FORMAT = "normalign-rfam"
VERSION = 1
Model = TypeVar("Model")
# Fitted attributes that an estimator may have beside its machine.
ARRAYS = ("classes_", "intercept_", "feature_names_in_")
# What a machine is made of.
TENSORS = ("mean", "factor", "points", "dual_coef")
SCALARS = ("bandwidth", "kernel", "jitter")
VALUES = ("history_", "best_iter_", "n_features_in_", "_single_output")


def _plain(value: Any) -> Any:
    """Numbers and text as JSON has them; NumPy scalars become Python's."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    msg = f"{type(value).__name__} can't be saved"
    raise TypeError(msg)


def _array(name: str, value: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """The array without Python objects, and whether it held strings as objects."""
    array = np.asarray(value)
    if array.dtype != object:
        return array, False
    if not all(isinstance(item, str) for item in array.ravel()):
        msg = f"{name} must hold numbers, booleans or strings to be saved, got mixed objects"
        raise TypeError(msg)
    return array.astype(str), True


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes a fitted estimator; see ``RFAMClassifier.save``."""
    parameters = model.get_params(deep=False)
    if not isinstance(parameters.get("random_state"), int | np.integer | None):
        parameters["random_state"] = None
    arrays: dict[str, Any] = {}
    objects = []
    for name in ARRAYS:
        if name in vars(model):
            arrays[name], as_objects = _array(name, getattr(model, name))
            if as_objects:
                objects.append(name)
    for name in TENSORS:
        arrays[f"machine.{name}"] = getattr(model.machine_, name).cpu().numpy()
    machine = {name: _plain(getattr(model.machine_, name)) for name in SCALARS}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "class": type(model).__name__,
        "parameters": _plain(parameters),
        "values": {name: _plain(vars(model)[name]) for name in VALUES if name in vars(model)},
        "machine": machine,
        "objects": objects,
    }
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".normalign-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.savez(stream, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load(cls: type[Model], path: str | os.PathLike[str]) -> Model:
    """Reads an estimator of class ``cls``; see ``RFAMClassifier.load``."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        msg = f"{os.fspath(path)} is not a saved RFAM model: {error}"
        raise ValueError(msg) from error
    header = _header(arrays, path)
    if header["version"] > VERSION:
        msg = (
            f"{os.fspath(path)} has format version {header['version']}, this normalign reads up "
            f"to {VERSION}: update normalign"
        )
        raise ValueError(msg)
    if header["class"] != cls.__name__:
        msg = f"{os.fspath(path)} holds a {header['class']}, not a {cls.__name__}"
        raise ValueError(msg)
    model: Any = cls(**header["parameters"])
    for name, value in header["values"].items():
        setattr(model, name, value)
    for name in ARRAYS:
        if name in arrays:
            as_object = name in header["objects"]
            setattr(model, name, arrays[name].astype(object) if as_object else arrays[name])
    tensors: dict[str, Any] = {
        name.removeprefix("machine."): torch.from_numpy(value)
        for name, value in arrays.items()
        if name.startswith("machine.")
    }
    model.machine_ = _rfam_fit.Machine(**tensors, **header["machine"])
    return model  # type: ignore[no-any-return]


def _header(arrays: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        header = json.loads(str(arrays["header"]))
        known = header["format"] == FORMAT
    except (KeyError, ValueError, TypeError):
        known = False
    if not known:
        msg = f"{os.fspath(path)} is not a saved RFAM model"
        raise ValueError(msg)
    return dict(header)
