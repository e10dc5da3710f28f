"""Runs many independent tasks, writes each result as it comes, and picks up where it stopped."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import joblib
from tqdm import tqdm

from normalign._threads import torch_threads

Row = dict[str, Any]
Key = tuple[str, ...]
# A Parquet file can't be appended to: it is written anew, at most this often.
PARQUET_SECONDS = 10.0


@dataclasses.dataclass
class Task:
    """One unit of work, which gives one row for each of its keys.

    Attributes:
        keys: The key columns of each row that it gives.
        payload: What the work function receives, beside the keys that are still missing.
        cost: Predicted work, in any unit that is the same for all tasks.
    """

    keys: list[Row]
    payload: Any
    cost: float = 1.0


Work = Callable[[Any, list[Row]], Iterator[Row] | list[Row]]


def fingerprint(settings: Row) -> str:
    """A short digest of settings, so that results of other settings aren't mixed in."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class ResultFile:
    """Rows in a CSV or Parquet file that survives a kill at any moment.

    A CSV file is appended to, one whole line at a time. For Parquet the rows go to a CSV journal
    beside it, from which the file is replaced atomically.

    Args:
        path: ``.csv`` or ``.parquet``; ``None`` keeps the rows in memory alone.
        columns: All columns.
        key_columns: Those that tell rows apart.
        config: Digest of the settings, see ``fingerprint``; it is a column of the file.
        retry_failed: Leaves out rows with an ``error``, so that they run again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        columns: Sequence[str],
        key_columns: Sequence[str],
        config: str,
        retry_failed: bool = False,
    ) -> None:
        self.columns = [*columns, "config"]
        self.key_columns = list(key_columns)
        self.config = config
        self.rows: list[Row] = []
        self.path = None if path is None else pathlib.Path(path)
        self.parquet = False
        self._stream: IO[str] | None = None
        self._written = 0.0
        if self.path is None:
            return
        if self.path.suffix not in (".csv", ".parquet"):
            msg = f"the result file must end in .csv or .parquet, got {self.path.name!r}"
            raise ValueError(msg)
        self.parquet = self.path.suffix == ".parquet"
        self.journal = self.path.with_suffix(".parquet.csv") if self.parquet else self.path
        if self.parquet:
            _import_parquet()
            if self.path.exists() and not self.journal.exists():
                _parquet_to_csv(self.path, self.journal)
        self._read(retry_failed)

    def key(self, row: Row) -> Key:
        """The key of a row, as text: what is read back equals what was written."""
        return tuple(str(row[name]) for name in self.key_columns)

    @property
    def done(self) -> set[Key]:
        """Keys of the rows that are there."""
        return {self.key(row) for row in self.rows}

    def _read(self, retry_failed: bool) -> None:
        """Reads what an earlier run left, and cuts a line that it didn't finish."""
        if not self.journal.exists() or self.journal.stat().st_size == 0:
            return
        data = self.journal.read_bytes()
        whole = _whole_lines(data)
        lines = list(csv.reader(data[:whole].decode().splitlines(keepends=True)))
        if not lines:
            os.truncate(self.journal, 0)
            return
        if lines[0] != self.columns:
            msg = (
                f"{self.journal} holds other columns than this sweep writes: "
                f"{', '.join(sorted(set(lines[0]) ^ set(self.columns)))}; use another file"
            )
            raise ValueError(msg)
        for line in lines[1:]:
            row: Row = dict(zip(self.columns, line, strict=True))
            if row["config"] != self.config:
                msg = f"{self.journal} holds results of other settings; use another file"
                raise ValueError(msg)
            self.rows.append({name: _number(value) for name, value in row.items()})
        if whole < len(data):
            os.truncate(self.journal, whole)
        if retry_failed and any(row["error"] for row in self.rows):
            self.rows = [row for row in self.rows if not row["error"]]
            self._rewrite()

    def _rewrite(self) -> None:
        temporary = self.journal.with_suffix(".tmp")
        with open(temporary, "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(self.columns)
            writer.writerows([row[name] for name in self.columns] for row in self.rows)
        os.replace(temporary, self.journal)

    def append(self, row: Row) -> None:
        """Adds one row, on disk before this returns."""
        row = {name: _plain(row.get(name, "")) for name in self.columns[:-1]}
        row["config"] = self.config
        self.rows.append(row)
        if self.path is None:
            return
        if self._stream is None:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.journal, "a", newline="")
            if self._stream.tell() == 0:
                csv.writer(self._stream).writerow(self.columns)
        csv.writer(self._stream).writerow([row[name] for name in self.columns])
        self._stream.flush()
        os.fsync(self._stream.fileno())
        if self.parquet and time.monotonic() - self._written > PARQUET_SECONDS:
            self._replace_parquet()

    def _replace_parquet(self) -> None:
        assert self.path is not None
        pandas = _import_parquet()
        temporary = self.path.with_suffix(".parquet.tmp")
        pandas.DataFrame(self.rows, columns=self.columns).to_parquet(temporary, index=False)
        os.replace(temporary, self.path)
        self._written = time.monotonic()

    def close(self, complete: bool) -> None:
        """Closes the file; a complete Parquet file no longer needs its journal."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self.parquet and self.rows:
            self._replace_parquet()
            if complete:
                self.journal.unlink(missing_ok=True)


def _whole_lines(data: bytes) -> int:
    """Length of the prefix that ends after a complete record; quoted fields may hold newlines."""
    end = position = quotes = 0
    for line in data.splitlines(keepends=True):
        position += len(line)
        quotes += line.count(b'"')
        if line.endswith(b"\n") and quotes % 2 == 0:
            end = position
    return end


def _import_parquet() -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError as error:
        msg = f"a Parquet result file needs pandas and pyarrow ({error}); use .csv instead"
        raise ImportError(msg) from error
    return pandas


def _parquet_to_csv(path: pathlib.Path, journal: pathlib.Path) -> None:
    frame = _import_parquet().read_parquet(path)
    temporary = journal.with_suffix(".tmp")
    frame.to_csv(temporary, index=False, lineterminator="\r\n")
    os.replace(temporary, journal)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _number(text: str) -> int | float | str:
    """A field as it was before it became text: a number only where it reads back the same."""
    kinds: tuple[type[int] | type[float], ...] = (int, float)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            value = kind(text)
            return value if str(value) == text else text
    return text


def run_one(work: Work, task: Task, missing: list[Row], threads: int) -> list[Row]:
    """Runs in the worker; a failure becomes the ``error`` of the rows that it leaves open."""
    rows: list[Row] = []
    try:
        with torch_threads(threads):
            rows.extend(work(task.payload, missing))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}"
        text = f"{text}:{frame.lineno})".replace("\n", " ")
        given = [{name: row[name] for name in missing[0]} for row in rows]
        rows += [{**key, "error": text} for key in missing if key not in given]
    return rows


def run_tasks(
    tasks: Sequence[Task],
    work: Work,
    file: ResultFile,
    *,
    n_jobs: int = 1,
    threads: int = 1,
    progress: bool = True,
    description: str = "sweep",
) -> list[Row]:
    """Runs what isn't in the file yet, and returns all its rows.

    Args:
        tasks: The tasks; they start in this order.
        work: Receives a payload and the keys wanted, and yields a row for each.
        file: Where rows go, one by one.
        n_jobs: Workers; the backend is joblib's current one (``joblib.parallel_config``).
        threads: Threads of each worker.
        progress: Shows a bar with the time left, from the tasks' predicted work.
        description: Name on the bar.
    """
    done = file.done
    open_tasks = []
    for task in tasks:
        missing = [key for key in task.keys if file.key(key) not in done]
        if missing:
            # Work left of a task that was cut short.
            open_tasks.append((task, missing, task.cost * len(missing) / len(task.keys)))
    bar = tqdm(
        total=sum(cost for _, _, cost in open_tasks) or 1.0,
        desc=description,
        disable=not progress or not open_tasks,
        file=sys.stderr,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        smoothing=0.05,
    )
    complete = False
    failed = 0
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered", batch_size=1)
    try:
        jobs = (
            joblib.delayed(_run_indexed)(index, work, task, missing, threads)
            for index, (task, missing, _) in enumerate(open_tasks)
        )
        for count, (index, rows) in enumerate(parallel(jobs), 1):
            for row in rows:
                failed += bool(row.get("error"))
                file.append(row)
            bar.update(open_tasks[index][2])
            failures = f", {failed} failed" if failed else ""
            bar.set_postfix_str(f"{count}/{len(open_tasks)} tasks{failures}")
        complete = True
    finally:
        bar.close()
        file.close(complete)
    return file.rows


def _run_indexed(
    index: int, work: Work, task: Task, missing: list[Row], threads: int
) -> tuple[int, list[Row]]:
    return index, run_one(work, task, missing, threads)
