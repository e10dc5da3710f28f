"""The demonstration: GrokAlign groks sparse parity from every seed, and the command runs."""

import statistics

import pytest
import torch

from normalign import demo
from normalign.__main__ import main


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # conftest restores it


def test_every_seed_groks_sparse_parity():
    """The bar of the method: median at most 80 epochs, where the baseline takes about 2000."""
    task = demo.sparse_parity(budget=400)
    grokked = [demo.train(task, task.weight, seed).grokked for seed in range(5)]
    assert None not in grokked
    assert statistics.median(grokked) <= 80


def test_baseline_memorises_and_does_not_grok_as_soon():
    task = demo.sparse_parity(budget=200)
    run = demo.train(task, 0.0, 0, curves=True)
    assert run.grokked is None
    assert run.train_accuracy[-1] > demo.TRAIN_BAR
    assert run.test_accuracy[-1] < 0.6


@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib", "ignore::tqdm.TqdmWarning")
def test_command(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    state = torch.get_rng_state()
    arguments = ["demo", "--seeds", "2", "--budget", "12", "--output", str(figure)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("not within 12") == 4  # two tasks, two methods
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert torch.equal(torch.get_rng_state(), state)


def test_table_takes_medians_over_seeds():
    runs = [
        demo.Run("t", "baseline", 0, 1000, grokked=600, seconds=6.0),
        *(demo.Run("t", "GrokAlign", i, 1000, grokked=g, seconds=1.0) for i, g in
          enumerate([20, 30, None])),
    ]  # fmt: skip
    text = demo.table(runs)
    assert "30 (median; 20 to 1000)" in text
    assert "2 of 3" in text
    assert "t: 20 times fewer epochs, 6 times less training time" in text
