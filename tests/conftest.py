"""Paths, data and isolation shared by all tests."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Unless PYTHONPATH names the source tree, the installed package is tested: the tree, which holds no
# extension then, must not hide it, neither here nor in processes that tests start.
_NAMED = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
_INSTALLED = str(ROOT) not in _NAMED
if _INSTALLED:
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != str(ROOT)]
sys.path.insert(0, str(ROOT / "bench"))  # tests check the baselines that the benches time


@pytest.fixture(autouse=True, scope="session")
def _child_processes():
    """``python -c`` and ``python -m`` import from the current folder first: leave the tree's."""
    with pytest.MonkeyPatch.context() as patch:
        if _NAMED:
            patch.setenv("PYTHONPATH", os.pathsep.join(_NAMED))
        if _INSTALLED:
            patch.chdir(ROOT / "tests")
        yield


@pytest.fixture(autouse=True)
def _isolation():
    """Each test starts from one seed and leaves torch's settings as they were."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder with the real tables, or a skip that says where it was looked for."""
    path = pathlib.Path(os.environ.get("NORMALIGN_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set NORMALIGN_DATA")
    return path
