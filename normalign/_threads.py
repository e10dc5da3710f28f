"""Runs a body with a number of torch threads, and puts the setting back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def thread_count(n_jobs: int | None) -> int:
    """Threads meant by scikit-learn's ``n_jobs``: ``None`` is torch's setting, -1 every core.

    Raises:
        ValueError: ``n_jobs`` is 0 or not an integer.
    """
    if n_jobs is None:
        return torch.get_num_threads()
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or n_jobs == 0:
        msg = f"n_jobs must be None or a non-zero integer, got {n_jobs!r}"
        raise ValueError(msg)
    if n_jobs > 0:
        return n_jobs
    return max(1, available_cores() + 1 + n_jobs)


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Runs the body with ``count`` threads."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
