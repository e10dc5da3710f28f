"""The models, batches and losses that the GrokAlign bench trains."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass
class Problem:
    """One training step to be measured."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    criterion: Criterion
    weight: float = 0.1
    widths: tuple[int, ...] = ()  # of a stack of Linear layers; empty for any other model
    piecewise_linear: bool = True  # whether phi'' = 0


class SquareNet(nn.Module):
    """One hidden layer with activation ``z^2``, no bias: the network of modular addition."""

    def __init__(self, d: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d, hidden, bias=False)
        self.output = nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).square())


def mlp(widths: Sequence[int], activation: type[nn.Module], bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for d, n in itertools.pairwise(widths):
        layers += [nn.Linear(d, n, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def _stack(
    name: str,
    widths: tuple[int, ...],
    batch: int,
    activation: type[nn.Module] = nn.ReLU,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    model = mlp(widths, activation, bias).to(dtype)
    x = torch.randn(batch, widths[0], dtype=dtype)
    y = torch.randint(widths[-1], (batch,))
    linear = activation is nn.ReLU
    return Problem(name, model, x, y, nn.CrossEntropyLoss(), 0.1, widths, linear)


def parity_data(
    n: int, noise_bits: int = 40, parity_bits: int = 3, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Random bits, 0 or 1; the label is the parity of the first ones."""
    bits = torch.randint(2, (n, parity_bits + noise_bits), generator=generator)
    return bits.float(), bits[:, :parity_bits].sum(1) % 2


def _parity(dtype: torch.dtype, batch: int = 1000) -> Problem:
    name = f"parity {'f32' if dtype is torch.float32 else 'f64'} B{batch}"
    problem = _stack(name, (43, 200, 200, 2), batch, dtype=dtype)
    x, problem.y = parity_data(batch)
    problem.x = x.to(dtype)
    return problem


def _modular_addition(batch: int, p: int = 61, hidden: int = 256) -> Problem:
    """One-hot operands; class (a + b) mod p."""
    a, b = torch.randint(p, (2, batch))
    x = torch.cat([F.one_hot(a, p), F.one_hot(b, p)], 1).float()
    name, model = f"modular addition B{batch}", SquareNet(2 * p, hidden, p)
    return Problem(
        name, model, x, (a + b) % p, nn.CrossEntropyLoss(), 0.1, (2 * p, hidden, p), False
    )


def _xor(batch: int = 400, d: int = 40000) -> Problem:
    """High-dimensional XOR clusters: the sign of a product of two coordinates, scalar output."""
    model = mlp((d, 2048, 1), nn.ReLU, bias=False)
    x = torch.randn(batch, d) / d**0.5
    signs = 1.0 - 2.0 * torch.randint(2, (batch, 2))
    x[:, :2] = signs
    y = signs.prod(1, keepdim=True)
    return Problem(f"XOR B{batch}", model, x, y, nn.MSELoss(), 0.1, (d, 2048, 1))


class SmallTransformer(nn.Module):
    """Two encoder layers over embedded tokens; the mean over positions is classified."""

    def __init__(self, dim: int = 64, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            dim, heads, dim_feedforward=2 * dim, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(tokens).mean(1))


def _cnn(batch: int = 64) -> Problem:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
    return Problem(f"CNN with BatchNorm B{batch}", model, x, y, nn.CrossEntropyLoss())


def _transformer(batch: int = 32) -> Problem:
    x, y = torch.randn(batch, 16, 64), torch.randint(10, (batch,))
    return Problem(f"transformer encoder B{batch}", SmallTransformer(), x, y, nn.CrossEntropyLoss())


MNIST = (784, 200, 200, 200, 10)
WIDE = (512, 1024, 1024, 1024, 100)
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "parity": lambda: _parity(torch.float32),
    "parity64": lambda: _parity(torch.float64),
    "mnist": lambda: _stack("MNIST MLP B196", MNIST, 196),
    "mnist1024": lambda: _stack("MNIST MLP B1024", MNIST, 1024),
    "modadd32": lambda: _modular_addition(32),
    "modadd1116": lambda: _modular_addition(1116),
    "xor": _xor,
    "wide": lambda: _stack("wide ReLU B256", WIDE, 256),
    "widegelu": lambda: _stack("wide GELU B256", WIDE, 256, nn.GELU),
    "cnn": _cnn,
    "transformer": _transformer,
    "tiny": lambda: _stack("tiny MLP B2", (4, 4, 2), 2),
}


def make(name: str) -> Problem:
    """The named problem, from a fixed seed."""
    torch.manual_seed(0)
    return PROBLEMS[name]()
