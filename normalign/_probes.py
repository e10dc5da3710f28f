"""Random probe vectors, drawn from streams that leave torch's global generators untouched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = ("gaussian", "rademacher", "sphere")


def draw(
    kind: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """Probes of shape ``(P, B, c)`` with ``E[v v^T] = I`` for each kind.

    So ``E|J^T v|^2 = ||J||_F^2`` always; on the sphere the rows have norm ``sqrt(c)``.
    """
    if kind == "rademacher":
        v = torch.empty(shape, dtype=dtype, device=device).bernoulli_(0.5, generator=generator)
        return 2 * v - 1
    v = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    if kind == "sphere":
        tiny = torch.finfo(dtype).tiny
        v *= shape[-1] ** 0.5 / v.norm(dim=-1, keepdim=True).clamp_min_(tiny)
    return v


def identity(batch: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All ``c`` unit vectors, scaled so that their mean is exact: shape ``(c, B, c)``."""
    eye = torch.eye(outputs, dtype=dtype, device=device) * outputs**0.5
    return eye.unsqueeze(1).expand(outputs, batch, outputs)


class ProbeStream:
    """One private random stream per device, all started from one seed.

    Its state can be saved and restored exactly; a stream that is restored before its device has
    been used continues there too.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

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
        """Continues from what ``state`` returned."""
        self.seed = int(state["seed"])
        self._generators = {}
        for name, values in state["states"].items():
            self.on(torch.device(name)).set_state(values.cpu())

    def __getstate__(self) -> dict[str, Any]:
        return self.state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._generators = {}
        self.restore(state)


_default: ProbeStream | None = None


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
