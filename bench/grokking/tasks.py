"""The five settings of the paper's public code, and modular addition on tokens."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from baselines.problems import SquareNet, mlp, parity_data
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Setup:
    """What one seed of a task trains: a fresh model, and its data."""

    model: nn.Module
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    disturb: Callable[[Tensor], Tensor] | None = None  # a noisy copy of the test points

    def penalised(self) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
        """What comes before the penalty's input, and the model from there: embeddings, or x."""
        return getattr(self.model, "embed", lambda x: x), getattr(self.model, "body", self.model)


@dataclasses.dataclass(frozen=True)
class Task:
    """A setting: data, model, optimizer and what counts as grokked (accuracies in percent)."""

    title: str
    setup: Callable[..., Setup]
    max_epochs: int
    train_above: float
    test_above: float
    lr: float
    weight_decay: float
    weights: Mapping[str, float]  # penalty weight by method
    egalitarian: tuple[float, float]  # learning rate and weight decay of its plain descent
    sgd: bool = False  # else AdamW
    batch: int | None = None  # None: all of the training set
    squared_error: bool = False

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        if not self.squared_error:
            return F.cross_entropy(logits, y)
        if logits.shape[1] == 1:  # labels are signs
            return F.mse_loss(logits[:, 0], y)
        return F.mse_loss(logits, F.one_hot(y, logits.shape[1]).to(logits.dtype))

    def accuracy(self, logits: Tensor, y: Tensor) -> float:
        predicted = logits[:, 0].sign() if logits.shape[1] == 1 else logits.argmax(1)
        return 100 * (predicted == y).double().mean().item()


def parity(samples: int = 1000) -> Setup:
    """Parity of 3 bits among 43; 1000 training points and 1000 test points."""
    x, y = parity_data(samples + 1000)
    model = mlp((43, 200, 200, 2), nn.ReLU)
    return Setup(model, x[:samples], y[:samples], x[samples:], y[samples:])


def _sums(p: int, samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))[torch.randperm(p * p)]
    y = pairs.sum(1) % p
    return pairs[:samples], y[:samples], pairs[samples:], y[samples:]


def modular_addition(samples: int = int(0.3 * 61 * 61), p: int = 61) -> Setup:
    """One-hot pairs a, b; class (a + b) mod p."""
    x, y, x_test, y_test = _sums(p, samples)
    model = SquareNet(2 * p, 256, p).double()
    one_hot = [F.one_hot(t, p).flatten(1).double() for t in (x, x_test)]
    return Setup(model, one_hot[0], y, one_hot[1], y_test)


def mnist_file() -> pathlib.Path:
    """Where the images are looked for."""
    default = pathlib.Path(__file__).parents[3] / "shared" / "data"
    return pathlib.Path(os.environ.get("NORMALIGN_DATA", default)) / "mnist_first2048_1024.npz"


def mnist(samples: int = 1024) -> Setup:
    """The first 1024 images of each split; every parameter starts 8 times as large."""
    with np.load(mnist_file()) as f:
        arrays = [torch.from_numpy(f[k]) for k in ("x_train", "y_train", "x_test", "y_test")]
    x, x_test = ((a.flatten(1).double() / 255 - 0.1307) / 0.3081 for a in arrays[::2])
    y, y_test = (a.long() for a in arrays[1::2])
    model = mlp((784, 200, 200, 200, 10), nn.ReLU).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return Setup(model, x[:samples], y[:samples], x_test[:1024], y_test[:1024])


def xor_points(n: int, p: int) -> tuple[Tensor, Tensor]:
    """Two signs, then small noise; the label is the product of the signs."""
    signs = 1.0 - 2.0 * torch.randint(2, (n, p), dtype=torch.int8)
    return torch.cat([signs[:, :2], 0.05 * signs[:, 2:]], 1), signs[:, :2].prod(1)


def xor_full(samples: int = 400, p: int = 40_000, width: int = 2048) -> Setup:
    """XOR clusters in p dimensions, as stated: one step takes seconds."""
    model = mlp((p, width, 1), nn.ReLU, bias=False)
    x, y = xor_points(samples, p)
    x_test, y_test = xor_points(400, p)

    def disturb(t: Tensor) -> Tensor:
        return torch.cat([t[:, :2], t[:, 2:] + 0.2 * torch.randn_like(t[:, 2:])], 1)

    return Setup(model, x, y, x_test, y_test, disturb)


@functools.lru_cache(maxsize=1)
def _xor_span(seed: int, *size: int) -> tuple[Tensor, ...]:
    """First and last weights, points, labels and noise of the reduced task, all of one seed."""
    torch.manual_seed(seed)
    full = xor_full(*size)
    first = full.model[0].weight.detach()
    rows = torch.cat([first, full.x])
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    cross = torch.zeros(len(rows), len(full.x_test), dtype=torch.float64)
    for part, test in zip(rows.split(4000, 1), full.x_test.split(4000, 1), strict=True):
        gram += (part @ part.T).double()
        cross += (part @ test.T).double()
    lower = torch.linalg.cholesky(gram)
    x_test = torch.linalg.solve_triangular(lower, cross, upper=False).T
    # Noise on all but the two signal features has covariance I - U U^T here, U = Q[:, :2].
    signal = torch.linalg.solve_triangular(lower, rows[:, :2].double(), upper=False)
    u, s, _ = torch.linalg.svd(signal, full_matrices=False)
    shrink = (u * (1 - (1 - s.square()).clamp(min=0).sqrt())) @ u.T
    first, x = lower.float().split([len(first), len(full.x)])
    last = full.model[2].weight.detach()
    return first, last, x, full.y, x_test.float(), full.y_test, shrink.float()


def xor(samples: int = 400, p: int = 40_000, width: int = 2048) -> Setup:
    """The same in an orthonormal basis of all that training can reach: 16 times cheaper.

    Every gradient of the first layer, of any penalty here, lies in the span of its first rows and
    the training points, and all methods on this task commute with rotations of the input. So
    with R = [W; X] = L Q, Q's rows orthonormal, training on the rows of L follows the same path;
    a test point t becomes Q t. Exact but for rounding, and tested.
    """
    seed = torch.initial_seed()
    first, last, x, y, x_test, y_test, shrink = _xor_span(seed, samples, p, width)
    torch.manual_seed(seed)  # what follows does not depend on whether the span was in the cache
    model = mlp((len(first) + len(x), width, 1), nn.ReLU, bias=False)
    with torch.no_grad():
        model[0].weight.copy_(first)
        model[2].weight.copy_(last)

    def disturb(t: Tensor) -> Tensor:
        noise = torch.randn_like(t)
        return t + 0.2 * (noise - noise @ shrink)

    return Setup(model, x, y, x_test, y_test, disturb)


class TokenModel(nn.Module):
    """Embeddings of two tokens and their positions; of them, a transformer block and a read-out."""

    def __init__(self, p: int, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(p, dim), nn.Parameter(torch.randn(2, dim))
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        self.body = nn.Sequential(block, nn.Flatten(), nn.Linear(2 * dim, p, bias=False))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))


def tokens(samples: int = 720, p: int = 31) -> Setup:
    """Modular addition on the tokens a, b; three quarters of all pairs train."""
    return Setup(TokenModel(p), *_sums(p, samples))


def _weights(joint: float, squared: float) -> dict[str, float]:
    """The authors' weight for their penalty, ours for the two squared norms."""
    return {"joint": joint, "joint_authors": joint, "orthogonal": squared, "jacobian": squared}


_MNIST = Task(
    "MNIST, cross-entropy", mnist, 20_000, 99, 80, 1e-3, 0.01, _weights(0.01, 0.01), (0.1, 0.01),
    batch=196,
)  # fmt: skip
_XOR = Task(
    "XOR, p = 40,000", xor, 1000, 99, 95, 0.1, 0.1, _weights(1.0, 1.0), (0.1, 0.1),
    sgd=True, squared_error=True,
)  # fmt: skip
TASKS = {
    "parity": Task(
        "Sparse parity", parity, 20_000, 99, 90, 1e-2, 0.1, _weights(0.1, 1.0), (0.3, 0.0)
    ),
    "modadd": Task(
        "Modular addition", modular_addition, 1000, 99, 99, 1e-3, 1.0, _weights(0.01, 1e-4),
        (0.1, 0.02), batch=32,
    ),
    "xor": _XOR,
    "xor_full": dataclasses.replace(_XOR, title="XOR, unreduced", setup=xor_full),
    "mnist_ce": _MNIST,
    "mnist_se": dataclasses.replace(_MNIST, title="MNIST, squared error", squared_error=True,
        egalitarian=(0.1, 0.1)),
    "tokens": Task(
        "Modular addition on tokens", tokens, 3000, 99, 95, 3e-3, 1.0, _weights(1e-4, 1e-4),
        (0.1, 0.01),
    ),
}  # fmt: skip
