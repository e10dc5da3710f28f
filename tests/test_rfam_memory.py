"""The estimate of a fit's memory against its measured peak, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from normalign import _load
from normalign._rfam_memory import fit_bytes

# n, d, c, dtype, alpha: tiles, the AGOP's Gram form, a rank below d, float64, many classes.
CASES = [
    (2000, 20, 3, "float32", 0.0),
    (1000, 300, 10, "float32", 0.0),
    (1000, 300, 10, "float32", 1.0),
    (1500, 100, 10, "float32", 0.0),
    (400, 500, 4, "float32", 0.0),
    (1500, 20, 3, "float64", 0.0),
    (2000, 10, 30, "float32", 0.0),
    (300, 5, 2, "float32", 0.0),
]

MEASURE = """
import ctypes, gc, json, pathlib, sys
import torch
import torch.nn.functional as F
from normalign import _rfam_fit

def status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def table(n, d, c, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    labels = (x @ torch.randn(d, c, generator=g)).argmax(1)
    return x.to(dtype), F.one_hot(labels, c).to(dtype)

torch.set_num_threads(1)
_rfam_fit.fit(*table(200, 70, 3, torch.float32))  # what libraries allocate once
peaks = []
for n, d, c, dtype, alpha in json.loads(sys.argv[1]):
    x, y = table(n, d, c, getattr(torch, dtype))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    _rfam_fit.fit(x, y, n_iter=3, alpha=alpha)
    peaks.append(status("VmHWM") - before)
print(json.dumps(peaks))
"""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    if _load.cpu_error is not None:
        pytest.skip(_load.cpu_error)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("peak memory is measured through /proc")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NORMALIGN_IMPL": "native",
        # What is freed goes back at once, whatever was allocated before.
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("away"),  # not where the sources hide the installed package
        env=environment,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_estimate_is_near_the_peak(case, peaks, monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", "native")
    n, d, c, dtype, _alpha = CASES[case]
    itemsize = 4 if dtype == "float32" else 8
    estimate = fit_bytes(n, d, c, itemsize)
    assert peaks[case] < 1.15 * estimate + 2**19
    assert estimate < 1.4 * peaks[case] + 2**20


def test_half_of_a_matrix(peaks):
    n, d, c = CASES[0][:3]
    # Beside n^2 / 2: points and panels of two machines, float64 panels, covariance, coefficients.
    assert peaks[0] < 4 * (0.53 * n * n + n * (8 * d + 100 * c)) + 2**20
