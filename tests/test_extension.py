"""The boundary of the compiled module: addresses, instruction sets, configuration."""

import os
import subprocess
import sys

import pytest
import torch

import normalign
from normalign import _load
from normalign.testing import isa_names

needs_native = pytest.mark.skipif(_load._C is None, reason=str(_load.cpu_error))


@needs_native
def test_null_address_is_refused():
    with pytest.raises(ValueError, match="g has no memory"):
        _load._C.orthogonal_projection_f32(1, 1, 0, 1, 0, 1, 0, 1, 0, 1)
    _load._C.orthogonal_projection_f32(0, 1, 0, 1, 0, 1, 0, 1, 0, 1)  # nothing to read


@needs_native
@pytest.mark.parametrize("isa", isa_names())
def test_instruction_set_from_the_environment(isa):
    code = "from normalign import _load; print(_load._C.isa())"
    env = {**os.environ, "NORMALIGN_CPU": isa}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == isa


@needs_native
def test_unknown_instruction_set_is_refused():
    assert not _load._C.select_isa("mmx")


@needs_native
def test_one_openmp_runtime():
    """Two runtimes would mean two thread pools that compete for the same cores."""
    from normalign._config import config

    runtimes = [p for p in config()["openmp runtimes"] if "torch" in p or "libgomp.so" in p]
    assert len(runtimes) <= 1, runtimes


def test_show_config(capsys):
    normalign.show_config()
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "instruction set" in out


def test_unknown_implementation_is_an_error(monkeypatch):
    monkeypatch.setenv("NORMALIGN_IMPL", "fast")
    with pytest.raises(ValueError, match="NORMALIGN_IMPL must be one of auto, native, reference"):
        normalign.orthogonal_projection(torch.zeros(1, 1), torch.zeros(1, 1))
