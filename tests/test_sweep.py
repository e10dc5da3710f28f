"""sweep, its result file, and the command line."""

from __future__ import annotations

import csv
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import joblib
import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification

import normalign
from normalign import RFAMClassifier, sweep
from normalign.__main__ import main
from normalign._sweep import SweepResult
from normalign._sweep_runner import ResultFile, Task, run_tasks

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = {"alpha": (0.0, 1.0), "reg": (0.1, 0.01), "folds": 2, "n_iter": 2, "eps": (0.5,)}


def table(n=60, seed=0, classes=3):
    return make_classification(
        n, 4, n_informative=3, n_redundant=0, n_classes=classes, random_state=seed
    )


def figures(rows):
    """What two runs must agree on: everything but the time taken."""
    return sorted(tuple((k, str(v)) for k, v in row.items() if k != "seconds") for row in rows)


def test_every_setting_of_every_fold(tmp_path):
    tables = {"a": table(seed=1), "b": table(seed=2)}
    result = sweep(tables, bandwidth=(5.0, 10.0), progress=False, **SMALL)
    keys = {tuple(row[k] for k in normalign._sweep.KEYS) for row in result.rows}
    expected = itertools.product("ab", (0, 1), (0.0, 1.0), (0.1, 0.01), (5.0, 10.0), ("laplace",))
    assert keys == set(expected)
    assert len(result.rows) == len(keys)
    assert not result.failed
    for row in result.rows:
        assert row["robust_0.5"] <= row["test_score"] + 1e-12


def test_row_is_what_the_estimator_gives():
    X, y = table(80)
    train, test = np.arange(60), np.arange(60, 80)
    result = sweep(
        (X, y), alpha=0.3, reg=0.05, bandwidth=4.0, n_iter=3, folds=[(train, test)], eps=(0.5,),
        preprocess=None, progress=False,
    )  # fmt: skip
    model = RFAMClassifier(alpha=0.3, reg=0.05, bandwidth=4.0, n_iter=3, dtype="float32")
    model.fit(X[train], y[train])
    (row,) = result.rows
    assert row["test_score"] == pytest.approx(model.score(X[test], y[test]))
    report = normalign.robustness_report(model, X[test], y[test], eps=[0.5])
    assert row["robust_0.5"] == pytest.approx(report.robust_accuracy[1])
    assert row["success_0.5"] == pytest.approx(report.attack_success_on_correct[1])
    assert row["effective_rank"] == pytest.approx(report.effective_rank, rel=1e-5)
    assert row["normal_alignment"] == pytest.approx(report.normal_alignment, rel=1e-5)
    assert (row["rows"], row["features"], row["outputs"]) == (60, 4, 3)


def test_features_are_scaled_by_the_training_rows_alone():
    X, y = table()
    other = X.copy()
    other[50:] *= 1e3  # rows that are in no part of the fold
    half = [(np.arange(40), np.arange(40, 50))]
    a = sweep((X, y), progress=False, **{**SMALL, "folds": half})
    b = sweep((other, y), progress=False, **{**SMALL, "folds": half})
    assert figures(a.rows) == figures(b.rows)


def test_resumes_with_nothing_done_twice(tmp_path):
    out = tmp_path / "r.csv"
    whole = sweep({"a": table()}, progress=False, **SMALL)
    sweep({"a": table()}, out=out, progress=False, **SMALL)
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    # Cut in the middle of the fourth row, as a kill during a write would.
    out.write_bytes(b"".join(lines[:4]) + lines[4][:17])
    before = b"".join(lines[:4])
    again = sweep({"a": table()}, out=out, progress=False, **SMALL)
    assert out.read_bytes().startswith(before)
    assert len(out.read_bytes().splitlines()) == 9
    assert figures(again.rows) == figures(
        {**row, "config": again.rows[0]["config"]} for row in whole.rows
    )
    size = out.stat().st_size
    third = sweep({"a": table()}, out=out, progress=False, **SMALL)
    assert out.stat().st_size == size
    assert figures(third.rows) == figures(again.rows)


def test_killed_process_resumes(tmp_path):
    """A real kill, in the middle of a run with two workers."""
    X, y = table(120)
    rows = [*(",".join(map(str, row)) + f",{label}" for row, label in zip(X, y, strict=True))]
    data = tmp_path / "t.csv"
    data.write_text("\n".join(["a,b,c,d,target", *rows]) + "\n")
    out = tmp_path / "r.csv"
    command = [sys.executable, "-m", "normalign", "sweep", str(data), "--target", "target"]
    command += ["--out", str(out), "--folds", "5", "--reg", "1", "0.1", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--jobs", "2"], env=environment, cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if out.exists() and out.read_bytes().count(b"\n") >= 4:
                break
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    killed = out.read_bytes()
    done = killed[: killed.rindex(b"\n") + 1]
    assert 4 <= done.count(b"\n") < 21, "the run was to be killed before its end"
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert finished.returncode == 0, finished.stderr.decode()
    assert out.read_bytes().startswith(done)
    with open(out, newline="") as stream:
        keys = [tuple(row[k] for k in normalign._sweep.KEYS) for row in csv.DictReader(stream)]
    assert len(keys) == len(set(keys)) == 20


def test_failing_setting_is_recorded_and_the_rest_goes_on(tmp_path):
    X, y = table()
    broken = X.copy()
    broken[3, 1] = np.nan
    out = tmp_path / "r.csv"
    arguments = {"out": out, "preprocess": None, "progress": False, **SMALL}
    result = sweep({"bad": (broken, y), "good": (X, y)}, **arguments)
    assert len(result.rows) == 16
    assert {row["table"] for row in result.failed} == {"bad"}
    assert len(result.failed) == 8
    assert all("ValueError: the features hold NaN" in row["error"] for row in result.failed)
    assert {row["table"] for row in result.summary()} == {"good"}
    # Recorded once; run again on request alone.
    assert len(sweep({"bad": (X, y), "good": (X, y)}, **arguments).failed) == 8
    mended = sweep({"bad": (X, y), "good": (X, y)}, retry_failed=True, **arguments)
    assert not mended.failed
    assert len(mended.rows) == 16
    assert len(out.read_text().splitlines()) == 17


def test_too_large_a_table_is_recorded():
    result = sweep({"a": table()}, memory_limit="5KB", progress=False, **SMALL)
    assert all("MemoryError: a fit on 30 rows" in row["error"] for row in result.rows)


def test_file_of_other_settings_is_refused(tmp_path):
    out = tmp_path / "r.csv"
    sweep(table(), out=out, progress=False, **SMALL)
    with pytest.raises(ValueError, match="holds results of other settings"):
        sweep(table(), out=out, progress=False, **{**SMALL, "n_iter": 3})
    with pytest.raises(ValueError, match=r"other columns than this sweep writes: robust_0.7"):
        sweep(table(), out=out, progress=False, **{**SMALL, "eps": (0.5, 0.7)})
    with pytest.raises(ValueError, match=r"must end in .csv or .parquet"):
        sweep(table(), out=tmp_path / "r.txt", progress=False, **SMALL)
    # More of the same settings is no other sweep.
    more = sweep(table(), out=out, progress=False, **{**SMALL, "reg": (0.1, 0.01, 0.001)})
    assert len(more.rows) == 12


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    out = tmp_path / "r.parquet"
    result = sweep(table(), out=out, progress=False, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]
    frame = pandas.read_parquet(out)
    assert frame["test_score"].tolist() == [row["test_score"] for row in result.rows]
    more = sweep(table(), out=out, progress=False, **{**SMALL, "reg": (0.1, 0.01, 0.001)})
    assert len(more.rows) == len(pandas.read_parquet(out)) == 12
    # A kill leaves the journal, which is then what counts.
    file = ResultFile(tmp_path / "k.parquet", ["key", "value", "error"], ["key"], "c")
    row = {"key": 1, "value": 'x,\n"y"', "error": ""}
    file.append(row)
    file._stream.close()
    again = ResultFile(tmp_path / "k.parquet", ["key", "value", "error"], ["key"], "c")
    assert again.rows == [{**row, "config": "c"}]


def _report_threads(payload, missing):
    for key in missing:
        yield {**key, "threads": torch.get_num_threads(), "pid": os.getpid(), "error": ""}


@pytest.mark.parametrize(("n_jobs", "threads"), [(1, 1), (2, 1)])
def test_threads_of_the_workers(n_jobs, threads):
    """C23: as many threads as asked for in each worker, and the caller's setting as before."""
    torch.set_num_threads(2)
    tasks = [Task([{"key": k}], None) for k in range(6)]
    file = ResultFile(None, ["key", "threads", "pid", "error"], ["key"], "")
    rows = run_tasks(tasks, _report_threads, file, n_jobs=n_jobs, threads=threads, progress=False)
    assert {row["threads"] for row in rows} == {threads}
    assert torch.get_num_threads() == 2
    if n_jobs == 1:
        assert {row["pid"] for row in rows} == {os.getpid()}


def test_workers_give_the_same_rows():
    one = sweep({"a": table()}, progress=False, **SMALL)
    two = sweep({"a": table()}, n_jobs=2, progress=False, **SMALL)
    assert figures(one.rows) == figures(two.rows)


@pytest.mark.filterwarnings("ignore")  # what the cluster itself warns of is not ours
def test_dask_cluster():
    distributed = pytest.importorskip("distributed", reason="the dask backend is not installed")
    one = sweep({"a": table()}, progress=False, **SMALL)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        two = sweep({"a": table()}, n_jobs=-1, progress=False, **SMALL)
    assert figures(one.rows) == figures(two.rows)


def test_progress_bar(capsys):
    sweep(table(), **SMALL)
    shown = capsys.readouterr().err
    assert "4/4 tasks" in shown
    assert "100%" in shown


def test_data_frame_with_text_and_gaps():
    pandas = pytest.importorskip("pandas")
    X, y = table()
    frame = pandas.DataFrame(X, columns=list("abcd"))
    frame["colour"] = np.array(["red", "green", None])[y]
    frame.loc[5, "a"] = np.nan
    result = sweep((frame, np.array(["x", "y", "z"])[y]), progress=False, **SMALL)
    assert not result.failed
    assert result.best()["table"]["test_score"] > 0.9  # the colour tells the class


def test_regression():
    X, _ = table()
    result = sweep((X, X[:, 0] ** 2 + 50.0), progress=False, **{**SMALL, "reg": 1e-3})
    assert not result.failed
    assert all(row["test_score"] > 0.3 for row in result.rows)
    assert all(row["robust_0.5"] == "" for row in result.rows)
    targets = np.c_[X[:, 0], X[:, 1]]
    assert not sweep((X, targets), task="regression", progress=False, **SMALL).failed


def test_class_missing_in_a_fold():
    X, y = table()
    y = np.r_[7, y[1:]]  # one row of its own class
    result = sweep((X, y), progress=False, **SMALL)
    assert not result.failed
    assert all(row["outputs"] == 4 for row in result.rows)


def test_validation_chooses_the_iteration():
    result = sweep(table(100), validation_fraction=0.3, progress=False, **{**SMALL, "n_iter": 4})
    assert all(isinstance(row["valid_score"], float) for row in result.rows)
    assert {row["best_iter"] for row in result.rows} <= set(range(4))
    assert all(row["rows"] == 35 for row in result.rows)


def made_up(points):
    return SweepResult(
        [
            {"table": "t", "fold": fold, "alpha": 0.0, "reg": float(i), "bandwidth": 1.0,
             "kernel": "laplace", "test_score": a + shift, "robust_1": b - shift, "error": ""}
            for i, (a, b) in enumerate(points)
            for fold, shift in ((0, 0.01), (1, -0.01))
        ]
    )  # fmt: skip


def test_summary_best_and_pareto(tmp_path):
    result = made_up([(0.9, 0.1), (0.8, 0.5), (0.7, 0.4), (0.6, 0.8), (0.9, 0.05)])
    assert [row["test_score"] for row in result.summary()] == pytest.approx(
        [0.9, 0.8, 0.7, 0.6, 0.9]
    )
    assert result.best("robust_1")["t"]["reg"] == 3.0
    assert [row["reg"] for row in result.pareto("t", 1)] == [3.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"eps must be one of the sweep's radii \[1.0\], got 2"):
        result.pareto("t", 2)
    with pytest.raises(ValueError, match="by must be a column"):
        result.best("speed")


def test_plot_and_frame(tmp_path):
    pytest.importorskip("matplotlib")
    result = made_up([(0.9, 0.1), (0.8, 0.5)])
    figure = result.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    (axis,) = [axis for axis in figure.axes if axis.get_visible()]
    assert sorted(axis.lines[0].get_xdata()) == pytest.approx([0.8, 0.9])
    pytest.importorskip("pandas")
    assert len(result.to_frame()) == 4


def test_settings_given_twice_run_once():
    settings = {**SMALL, "alpha": [0.0, 0.0], "bandwidth": [3.0, 3], "kernel": ["laplace"] * 2}
    keys = [(row["fold"], row["reg"]) for row in sweep(table(), progress=False, **settings).rows]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": 2.0}, ValueError, "alpha must lie between"),
        ({"reg": -1.0}, ValueError, "reg must be non-negative"),
        ({"bandwidth": 0.0}, ValueError, "bandwidth must be positive"),
        (
            {"kernel": ["laplace", 3.0]},
            ValueError,
            "kernel must be 'laplace', 'gaussian' or an exp",
        ),
        ({"memory_limit": "much"}, ValueError, "memory_limit must be bytes or text"),
        ({"eps": (0.0,)}, ValueError, "eps must be positive"),
        ({"folds": 1}, ValueError, "folds must be an integer of at least 2"),
        ({"n_iter": 0}, ValueError, "n_iter must be an integer"),
        ({"task": "ranking"}, ValueError, "task must be one of"),
        ({"dtype": "float16"}, ValueError, "dtype must be one of"),
        ({"attack": "weak"}, ValueError, "attack must be one of"),
        ({"preprocess": "scale"}, ValueError, "preprocess must be one of auto"),
        ({"random_state": None}, ValueError, "random_state must be an integer"),
        ({"tables": [1, 2]}, TypeError, "tables must be"),
        ({"tables": (np.zeros((3, 2)), np.zeros(4))}, ValueError, "as many rows, got 3 and 4"),
    ],
)
def test_refused(change, error, message):
    arguments = {"tables": table(), "progress": False, **SMALL, **change}
    with pytest.raises(error, match=message):
        sweep(arguments.pop("tables"), **arguments)


def test_command_line(tmp_path, capsys, monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    X, y = table()
    frame = pandas.DataFrame(X, columns=list("abcd"))
    frame["kind"] = np.array(["u", "v", "w"])[y]
    frame.to_csv("flowers.csv", index=False)
    command = ["sweep", "flowers.csv", "--target", "kind", "--reg", "0.1", "--folds", "2"]
    command += ["--eps", "0.5", "--kernel", "laplace", "1.5", "--plot", "p.png", "--quiet"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("flowers: alpha")
    assert "robust 0.5" in shown
    assert (tmp_path / "p.png").exists()
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 9
    assert main(["sweep", "flowers.csv", "--target", "price"]) == 1
    assert "no column 'price'; its columns are a, b, c, d, kind" in capsys.readouterr().err
    assert main(["sweep", "absent.csv", "--target", "kind"]) == 1
    assert "absent.csv" in capsys.readouterr().err
