"""A whole training step as one CUDA graph: one launch instead of dozens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normalign import _probes
from normalign._checks import check_count


class GraphStep:
    """What ``graph_step`` returns: call it with new inputs to run the captured step on them.

    Attributes:
        inputs: The captured step's own inputs; a call copies into them.
        outputs: What the step returned; every call overwrites it.
    """

    def __init__(self, graph: Any, inputs: Sequence[Tensor], outputs: Any) -> None:
        self._graph = graph
        self.inputs = tuple(inputs)
        self.outputs = outputs

    def __call__(self, *inputs: Tensor) -> Any:
        """Copies ``inputs`` in, replays the step, and returns its (overwritten) outputs."""
        if len(inputs) != len(self.inputs):
            msg = f"the captured step takes {len(self.inputs)} inputs, got {len(inputs)}"
            raise ValueError(msg)
        for i, (own, new) in enumerate(zip(self.inputs, inputs, strict=True)):
            if new.shape != own.shape or new.dtype != own.dtype:
                msg = (
                    f"input {i} must have shape {tuple(own.shape)} and dtype {own.dtype}, as "
                    f"captured, got {tuple(new.shape)} and {new.dtype}"
                )
                raise ValueError(msg)
        for own, new in zip(self.inputs, inputs, strict=True):
            if new is not own:
                own.copy_(new)
        self._graph.replay()
        return self.outputs


def graph_step(
    step: Callable[..., Any],
    *inputs: Tensor,
    warmup: int = 3,
    generators: Sequence[torch.Generator] = (),
) -> GraphStep:
    """Captures a training step in a CUDA graph, optimizer included.

    ::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
        loss_fn = normalign.GrokAlignLoss(nn.CrossEntropyLoss(), weight=0.1)

        def step(x, y):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        run = normalign.graph_step(step, x, y)
        for x, y in batches:  # of one shape
            loss = run(x, y)

    A small step is bound by launches; a replay is one. New probes are drawn in every replay: the
    streams of normalign's probes are registered with the graph.

    Args:
        step: The whole step, as a function of ``inputs``. It must neither synchronise (``.item()``,
            prints of values, ``check_finite=True``) nor change shapes; the optimizer must be
            capturable.
        *inputs: Tensors on one CUDA device. They are copied; their shapes and dtypes are fixed.
        warmup: Ordinary steps on these inputs before the capture, at least 1: libraries choose
            their algorithms then. They train the model like any other step.
        generators: Random generators that the step uses besides torch's default and normalign's.

    Raises:
        TypeError: an input is no tensor.
        ValueError: there is no input, or inputs are not on one CUDA device.
    """
    check_count("warmup", warmup)
    device = _device(inputs)
    own = [t.detach().clone() for t in inputs]
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                step(*own)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for generator in (*_probes.generators_of(device), *generators):
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            outputs = step(*own)
    return GraphStep(graph, own, outputs)


def _device(inputs: Sequence[Tensor]) -> torch.device:
    if not inputs:
        msg = "graph_step needs the step's inputs, got none"
        raise ValueError(msg)
    for i, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            msg = f"input {i} must be a torch.Tensor, got {type(tensor).__name__}"
            raise TypeError(msg)
        if tensor.device.type != "cuda" or tensor.device != inputs[0].device:
            msg = f"inputs must be on one CUDA device, got input {i} on {tensor.device}"
            raise ValueError(msg)
    return inputs[0].device
