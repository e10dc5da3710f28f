"""Loaders for the public table collections that the benches read.

The archive of Fernandez-Delgado et al. (JMLR 2014) keeps one folder per table: ``NAME.txt`` with
sizes, ``NAME_R.dat`` (or ``NAME_train_R.dat`` where there is a separate test file), the validation
split ``conxuntos.dat`` and the four folds ``conxuntos_kfold.dat``. It is read from the folder or
straight from a tar file.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import pathlib
import tarfile
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Split = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class Table:
    """One classification or regression table with the splits that come with it.

    Attributes:
        name: Name in the collection.
        X: Features, shape ``(n, d)``, float64 as read.
        y: Labels as integers ``0..c-1``, or real targets for regression.
        classes: Number of classes; 0 for regression.
        search: Rows to train on and to validate on while hyper-parameters are chosen.
        folds: Rows to train on and to test on.
    """

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.float64] | NDArray[np.int64]
    classes: int
    search: Split
    folds: list[Split]


def read_rows(text: str, columns: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Features and labels of an ``_R.dat`` file: a header, then index, features and class."""
    body = text[text.index("\n") + 1 :]
    numbers = np.array(body.split(), dtype=np.float64)
    rows = numbers.reshape(-1, columns + 2)
    return rows[:, 1:-1].copy(), rows[:, -1].astype(np.int64)


def _indices(text: str) -> list[NDArray[np.int64]]:
    return [np.array(line.split(), dtype=np.int64) for line in text.splitlines() if line.strip()]


def _build(name: str, files: dict[str, str]) -> Table:
    sizes = dict(
        (part.strip() for part in line.split("=", 1))
        for line in files[f"{name}.txt"].splitlines()
        if "=" in line
    )
    # Where there is a second (test) file, the published protocol reads the first alone.
    data = files.get(f"{name}_R.dat") or files[f"{name}_train_R.dat"]
    X, y = read_rows(data, int(sizes["n_entradas"]))
    train, valid = _indices(files["conxuntos.dat"])[:2]
    lines = _indices(files["conxuntos_kfold.dat"])
    folds = [(lines[2 * k], lines[2 * k + 1]) for k in range(len(lines) // 2)]
    return Table(name, X, y, int(sizes["n_clases"]), (train, valid), folds)


def _wanted(file: str) -> bool:
    return file.endswith((".txt", "_R.dat")) or file.startswith("conxuntos")


def archive_tables(path: str | pathlib.Path, names: list[str] | None = None) -> Iterator[Table]:
    """Yields the tables of the archive, from a tar file or an unpacked folder.

    A folder without the four files that the protocol needs is passed over.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        for folder in sorted(p for p in path.iterdir() if p.is_dir()):
            if names is None or folder.name in names:
                found = {p.name: p.read_text() for p in folder.iterdir() if _wanted(p.name)}
                yield from _complete(folder.name, found)
        return
    with tarfile.open(path) as archive:
        files: dict[str, dict[str, str]] = {}
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) < 2 or not _wanted(parts[-1]):
                continue
            if names is None or parts[-2] in names:
                stream = archive.extractfile(member)
                assert stream is not None
                files.setdefault(parts[-2], {})[parts[-1]] = stream.read().decode()
    for name in sorted(files):
        yield from _complete(name, files[name])


def _complete(name: str, files: dict[str, str]) -> Iterator[Table]:
    has_data = f"{name}_R.dat" in files or f"{name}_train_R.dat" in files
    if has_data and {f"{name}.txt", "conxuntos.dat", "conxuntos_kfold.dat"} <= files.keys():
        yield _build(name, files)


def published_results(path: str | pathlib.Path) -> dict[tuple[str, float], dict[str, float]]:
    """The published figures, by table and alpha."""
    results = {}
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            name, alpha = row.pop("dataset"), float(row.pop("alpha"))
            results[name, alpha] = {key: float(value) for key, value in row.items()}
    return results


def csv_gz_tables(
    folder: str | pathlib.Path, names: list[str] | None = None, seed: int = 0
) -> Iterator[Table]:
    """Yields the tables of a folder of ``NAME.csv.gz`` files with the column ``target``.

    Text columns become one column per value. Features are standardised, and the splits (half and
    half to choose, four folds to test) are drawn from ``seed``, in the proportions of the archive.
    """
    folder = pathlib.Path(folder)
    kinds = {}
    with open(folder / "MANIFEST.tsv", newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            kinds[row["name"]] = row.get("problem", "")
    for path in sorted(folder.glob("*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        if names is not None and name not in names:
            continue
        with gzip.open(path, "rt", newline="") as stream:
            header, *rows = csv.reader(io.StringIO(stream.read()))
        columns = dict(zip(header, zip(*rows, strict=True), strict=True))
        target = columns.pop("target")
        X = np.column_stack([_encode(values) for values in columns.values()])
        spread = X.std(axis=0)
        X = (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        if kinds.get(name) == "regression":
            y: NDArray[np.float64] | NDArray[np.int64] = np.array(target, dtype=np.float64)
            classes = 0
        else:
            labels, y = np.unique(np.array(target), return_inverse=True)
            classes = len(labels)
        yield Table(name, X, y, classes, *_splits(len(X), seed))


def _encode(values: tuple[str, ...]) -> NDArray[np.float64]:
    """Numbers as one column (missing ones as the mean), text as one column per value."""
    missing = {"", "NA", "nan", "?"}
    try:
        column = np.array([np.nan if v in missing else float(v) for v in values])
    except ValueError:
        levels, codes = np.unique(np.array(values), return_inverse=True)
        return np.eye(len(levels))[codes]
    fill = 0.0 if np.isnan(column).all() else float(np.nanmean(column))
    return np.where(np.isnan(column), fill, column)[:, None]


def _splits(n: int, seed: int) -> tuple[Split, list[Split]]:
    order = np.random.default_rng(seed).permutation(n)
    search = (order[: (n + 1) // 2], order[(n + 1) // 2 :])
    parts = np.array_split(np.random.default_rng(seed + 1).permutation(n), 4)
    folds = [(np.concatenate(parts[:k] + parts[k + 1 :]), parts[k]) for k in range(4)]
    return search, folds
