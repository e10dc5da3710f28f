"""The benches' harness: what it reports is true, and its comparison can fail."""

import dataclasses
import time

import harness
import pytest
import torch


def _bench(*arguments):
    return harness.Bench(harness.parser(None).parse_args(["--rounds", "5", *arguments]))


def _spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_ratio_refers_to_the_base_and_survives_csv(tmp_path, capsys):
    path = str(tmp_path / "out.csv")
    bench = _bench("--sample", "0.002", "--csv", path)
    calls = {"one": lambda: _spin(0.001), "three": lambda: _spin(0.003)}
    rows = bench.case("spin", calls, base="one", floor="three", flops=1e6)
    assert rows["one"].ratio == rows["three"].over_floor == 1
    assert 2.5 < rows["three"].ratio < 3.5  # a call costs microseconds beside these milliseconds
    assert 0.5 < rows["one"].gflops <= 1.01
    assert bench.finish() == 0
    assert harness.read_csv(path) == list(rows.values())
    out = capsys.readouterr().out
    assert all(f"# {fact}:" in out for fact in ("commit", "processor", "threads", "torch"))


def test_compare_fails_on_a_regression_only(tmp_path):
    row = harness.Row("case", "ours", 1, "process", 10, 9, 11, 1.5, 1.45, 1.55, 0, 0, -1)
    path = str(tmp_path / "old.csv")
    harness.write_csv(path, [row], {})
    bench = _bench("--compare", path)
    bench.rows = [row]
    assert bench.finish() == 0
    bench.rows = [dataclasses.replace(row, ratio=1.7, ratio_p20=1.5)]  # within the old spread
    assert bench.finish() == 0
    bench.rows = [dataclasses.replace(row, ratio=1.7, ratio_p20=1.65)]
    assert bench.finish() == 1


def test_answers_are_compared():
    good, bad = torch.ones(3), torch.tensor([1.0, 1.0, 1.01])
    harness.assert_same({"a": (good, [good]), "b": (good, [good])}, "a", 0.0)
    with pytest.raises(AssertionError, match=r"b: result 1 differs from a by 0\.01"):
        harness.assert_same({"a": (good, [good]), "b": (good, [bad])}, "a", 1e-3)
    with pytest.raises(AssertionError, match="b: result 0 differs"):
        harness.assert_same({"a": good, "b": good * float("nan")}, "a", 1e-3)


def test_peak_memory():
    bench = _bench()
    mib = bench._peak_mib(lambda: torch.ones(16 << 18).sum().item())  # 16 MiB
    if mib < 0:
        pytest.skip("no high-water mark that can be reset here")
    assert 15 < mib < 20
