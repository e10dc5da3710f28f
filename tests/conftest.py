"""Paths, data and isolation shared by all tests."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))  # tests check the baselines that the benches time


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
