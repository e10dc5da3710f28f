"""Random probe vectors, drawn from streams that leave torch's global generators untouched."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from normalign import _ops

KINDS = ("gaussian", "rademacher", "sphere")
HALF = (torch.bfloat16, torch.float16)


class ProbeStream:
    """One private random stream per device, all started from one seed.

    Its state can be saved and restored exactly. ``handle`` names the stream in compiled graphs,
    which cannot hold a generator.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.handle = next(_handles)
        self._generators: dict[torch.device, torch.Generator] = {}
        _streams[self.handle] = self

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device, created when it is first asked for."""
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device=device)
            generator.manual_seed(self.seed)
            self._generators[device] = generator
        return generator

    def state(self) -> dict[str, Any]:
        """Seed and generator states, as plain values and CPU byte tensors."""
        states = {str(d): g.get_state() for d, g in self._generators.items()}
        return {"seed": self.seed, "states": states}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what ``state`` returned; devices not used by then start from the seed."""
        self.seed = int(state["seed"])
        self._generators = {}
        for name, values in state["states"].items():
            self.on(torch.device(name)).set_state(values.cpu())

    def __getstate__(self) -> dict[str, Any]:
        return self.state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.handle = next(_handles)
        _streams[self.handle] = self
        self.restore(state)


_handles = itertools.count(1)
_streams: weakref.WeakValueDictionary[int, ProbeStream] = weakref.WeakValueDictionary()
_default: ProbeStream | None = None
DEFAULT_HANDLE = 0


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators of all live streams on a device: a CUDA graph has to know them."""
    streams = [*_streams.values()]
    return [s._generators[device] for s in streams if device in s._generators]


def default_generator(device: torch.device) -> torch.Generator:
    """The stream that serves calls without ``generator``.

    It starts from ``torch.initial_seed()``, which reads the global seed and draws nothing, and
    starts anew after ``torch.manual_seed`` with another seed.
    """
    global _default
    seed = torch.initial_seed()
    if _default is None or _default.seed != seed:
        _default = ProbeStream(seed)
    return _default.on(device)


def draw(
    kind: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """Probes of shape ``(P, B, c)`` with ``E[v v^T] = I`` for each kind.

    So ``E|J^T v|^2 = ||J||_F^2`` always; on the sphere the rows have norm ``sqrt(c)``. Half
    precision is drawn in float32.
    """
    if generator is None:
        generator = default_generator(device)
    if dtype in HALF:
        dtype = torch.float32
    v: Tensor
    if kind == "rademacher":
        v = torch.empty(shape, dtype=dtype, device=device)
        v.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return v
    v = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    if kind == "sphere":
        tiny = torch.finfo(dtype).tiny
        v *= math.sqrt(shape[-1]) / v.norm(dim=-1, keepdim=True).clamp_min_(tiny)
    return v


def identity(batch: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All ``c`` unit vectors, scaled so that their mean is exact: shape ``(c, B, c)``."""
    dtype = torch.float32 if dtype in HALF else dtype
    eye = torch.eye(outputs, dtype=dtype, device=device) * math.sqrt(outputs)
    return eye.unsqueeze(1).expand(outputs, batch, outputs)


def _draw_like(logits: Tensor, count: int, kind: str, handle: int) -> Tensor:
    generator = None if handle == DEFAULT_HANDLE else _streams[handle].on(logits.device)
    shape = (count, logits.shape[0], logits.shape[1])
    return draw(kind, shape, logits.dtype, logits.device, generator)


def _fake(logits: Tensor, count: int, kind: str, handle: int) -> Tensor:
    dtype = torch.float32 if logits.dtype in HALF else logits.dtype
    return torch.empty((count, *logits.shape), dtype=dtype, device=logits.device)


# For compiled graphs: opaque to the compiler, and never merged with a second draw.
draw_like = _ops.register(
    "draw_probes",
    "(Tensor logits, SymInt count, str kind, int handle) -> Tensor",
    _draw_like,
    _fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)
