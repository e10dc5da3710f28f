"""Every Python example of the README runs as a newcomer would run it: alone, in an empty folder."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import normalign

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^## (.*?)$|^```python\n(.*?)^```$", README.read_text(), re.M | re.S)


def _examples():
    title = ""
    for heading, code in BLOCKS:
        title = heading or title
        if code:
            yield pytest.param(code, id=title)


@pytest.mark.parametrize("code", list(_examples()))
def test_example(code, tmp_path):
    for name in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    script = tmp_path / "example.py"
    script.write_text(code)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_all_examples_were_found():
    titles = [e.id for e in _examples()]
    for title in ("GrokAlign in a plain loop", "Lightning", "Hugging Face Trainer", "RFAM"):
        assert title in titles


def test_embeddings_as_in_the_trainer_example():
    """The form of the Trainer example, without that library: gradients reach the embeddings."""
    embed, head = torch.nn.Embedding(10, 4).double(), torch.nn.Linear(8, 3).double()
    tokens, y = torch.randint(10, (5, 2)), torch.randint(3, (5,))
    v = torch.randn(1, 5, 3, dtype=torch.float64)

    def loss(weights):
        x = F.embedding(tokens, weights)
        logits, penalty = normalign.grokalign(
            head,
            x,
            forward=lambda m, e: {"logits": m(torch.tanh(e).flatten(1))},
            output="logits",
            probe_vectors=v,
        )
        return F.cross_entropy(logits, y) + 0.1 * penalty

    weights = embed.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, (weights,))


def test_relative_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
