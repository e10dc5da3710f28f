"""GrokAlign: logits and a Jacobian penalty from one shared forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _diagnose, _functional, _general, _inputs, _path, _probes, _stack
from normalign._path import Path
from normalign._probes import ProbeStream
from normalign._stack_native import Criterion, Loss

Output = Hashable | Callable[[Any], Tensor] | None


def grokalign(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    penalty: str = "orthogonal",
    num_probes: int = 1,
    probes: str = "gaussian",
    exact: bool = False,
    probe_vectors: Tensor | None = None,
    reduction: str = "mean",
    generator: torch.Generator | ProbeStream | None = None,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
    implementation: str = "auto",
    check_finite: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits of a model, and the GrokAlign penalty on its input-output Jacobian.

    Training towards a small penalty drives a network to normal alignment: Jacobians of rank one
    that point along the data, which brings generalisation (grokking) far sooner. With
    ``J = df/dx`` of each sample, from arXiv 2605.08464:

    - ``"orthogonal"``: ``E ||J (I - x x^T / |x|^2)||_F^2``, the part of J that is not along x
      (nothing is projected where x = 0);
    - ``"jacobian"``: ``E ||J||_F^2``;
    - ``"joint"``: ``E ||J||_F + E |f(x) - J x|^2``, the regulariser that the paper's authors
      publish. The root is taken per sample, of the mean over the probes; a root of few probes
      underestimates ``||J||_F``, which ``num_probes`` or ``exact`` reduces.

    Norms are estimated as ``|J^T v|^2`` with random ``v``, ``E[v v^T] = I``, so the squared
    penalties are unbiased for any number of probes.

    A model whose layers mix samples (BatchNorm in training mode) has no Jacobian per sample: then
    row i of the product is ``sum_k v_k^T df_k/dx_i``. Its running statistics are updated once per
    call, by the one forward pass.

    Args:
        model: Any module or callable that maps ``x`` to logits by operations that can be
            differentiated twice. It is called once.
        x: Inputs, shape ``(B, ...)``, floating point, finite. It, its ``requires_grad`` and its
            memory stay as they are. If it requires a gradient (embeddings, say) the penalty is
            differentiated through it too.
        penalty: ``"orthogonal"``, ``"jacobian"`` or ``"joint"``.
        num_probes: Random probes per sample; each costs about two passes.
        probes: ``"gaussian"``, ``"rademacher"`` (entries -1 and 1), or ``"sphere"`` (rows of norm
            ``sqrt(c)``).
        exact: Uses all ``c`` rows of J instead of random probes.
        probe_vectors: Probes to use instead of drawn ones, shape ``(P, B, c)``, for one penalty
            on several calls (a line search, a comparison).
        reduction: ``"mean"`` over the batch, or ``"none"`` for the penalty of each sample.
        generator: Where probes are drawn from; by default a private stream that starts from
            ``torch.initial_seed()``. The global random state is not touched.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``, for models with more
            arguments.
        output: Chooses the logits from what the model returns: a key (or attribute, or index), or
            a callable.
        implementation: ``"auto"``, the fused stack for models of Linear and activation layers, and
            the general path for all others; ``"native"``, the fused stack or an error with the
            reason why it cannot serve; ``"general"``, double backward with the fused projection;
            ``"reference"``, plain torch. ``normalign.explain`` tells which path a call takes.
            ``NORMALIGN_IMPL=reference`` turns ``"auto"`` into ``"reference"``; ``=native`` holds
            for the kernels beneath, so it leaves the general path its native projection.
        check_finite: Whether to look for NaN and infinity in ``x`` first. By default on the CPU
            only: on a GPU the check would wait for the device.

    Returns:
        The logits as the model gives them, and the penalty: a scalar, or shape ``(B,)``. Both are
        part of the graph; the fused stack differentiates once, the other paths any number of
        times. Under ``torch.no_grad()`` both are computed and detached.

    Raises:
        TypeError: ``x`` is not a floating-point tensor (pass token embeddings, not tokens), or the
            model returns no tensor.
        ValueError: an option, a shape or a device does not fit, ``x`` is not finite, or the logits
            have no gradient path to ``x``.
        RuntimeError: the model cannot be differentiated twice (torch.compile, reentrant
            checkpointing, a missing derivative), or ``"native"`` was asked for in vain.
    """
    _inputs.check_options(penalty, num_probes, probes, exact, reduction, implementation)
    if exact and probe_vectors is not None:
        msg = "probe_vectors must be None with exact=True, which uses every row of J"
        raise ValueError(msg)
    _inputs.check_x(x)
    functional = _functional.needed()
    if not functional and (x.is_cpu if check_finite is None else check_finite):
        _inputs.check_finite(x)

    own_call = forward is not None or output is not None
    path = _path.choose(model, x, penalty, implementation, functional, own_call)
    if isinstance(path, _stack.StackPlan):
        v = _vectors(
            x.shape[0], path.outputs, x, num_probes, probes, exact, probe_vectors, generator
        )
        return path.run(x, v, penalty, reduction)

    def make_probes(logits: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and probe_vectors is None and not exact:
            v: Tensor = _probes.draw_like(logits, num_probes, probes, _handle(generator))
            return v
        batch, outputs = logits.shape
        return _vectors(batch, outputs, logits, num_probes, probes, exact, probe_vectors, generator)

    select = _inputs.make_select(output)
    if functional:
        return _functional.run(model, forward, select, x, make_probes, penalty, reduction)
    if forward is None:
        _inputs.check_model(model, x)
    _diagnose.check_not_compiled(model)

    def call(x: Tensor) -> Tensor:
        return select(model(x) if forward is None else forward(model, x))

    terms = _general.penalty_terms if path.name == "general" else _general.reference_terms
    return _general.run(model, call, x, make_probes, penalty, reduction, terms)


def _vectors(
    batch: int,
    outputs: int,
    like: Tensor,
    num_probes: int,
    probes: str,
    exact: bool,
    probe_vectors: Tensor | None,
    generator: torch.Generator | ProbeStream | None,
) -> Tensor:
    """Probes ``(P, batch, outputs)`` with dtype and device of ``like``."""
    device = like.device
    if probe_vectors is not None:
        return _inputs.check_probes(probe_vectors, batch, outputs, device).to(like.dtype)
    if exact:
        return _probes.identity(batch, outputs, like.dtype, device)
    stream = generator.on(device) if isinstance(generator, ProbeStream) else generator
    return _probes.draw(probes, (num_probes, batch, outputs), like.dtype, device, stream)


def fused_loss(
    model: nn.Module,
    x: Tensor,
    criterion: Criterion,
    *,
    penalty: str = "orthogonal",
    num_probes: int = 1,
    probes: str = "gaussian",
    exact: bool = False,
    probe_vectors: Tensor | None = None,
    generator: torch.Generator | ProbeStream | None = None,
    implementation: str = "auto",
    check_finite: bool | None = None,
) -> Loss | None:
    """Criterion and weighted penalty by the fused stack; ``None`` where it cannot serve.

    The arguments are those of ``grokalign``, which is to be called where the answer is ``None``: it
    raises what there is to raise.
    """
    if exact and probe_vectors is not None:
        return None
    _inputs.check_options(penalty, num_probes, probes, exact, "mean", implementation)
    _inputs.check_x(x)
    if implementation not in ("auto", "native") or _functional.needed():
        return None
    path = _path.choose(model, x, penalty, implementation, False)
    if not isinstance(path, _stack.StackPlan):
        return None
    if not path.takes(criterion, x, penalty):
        return None
    if x.is_cpu if check_finite is None else check_finite:
        _inputs.check_finite(x)
    v = _vectors(x.shape[0], path.outputs, x, num_probes, probes, exact, probe_vectors, generator)
    return path.loss(x, v, penalty, criterion)


def explain(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    penalty: str = "orthogonal",
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
    implementation: str = "auto",
    **options: Any,
) -> Path:
    """The path that ``grokalign`` takes for these arguments; nothing is computed.

    Args:
        model: As for ``grokalign``.
        x: As for ``grokalign``.
        penalty: As for ``grokalign``.
        forward: As for ``grokalign``.
        output: As for ``grokalign``.
        implementation: As for ``grokalign``.
        **options: Others of ``grokalign``, which make no difference.

    Returns:
        ``name`` and ``reason``; prints as ``"general: the model holds a Conv2d"``, say.

    Raises:
        TypeError: ``x`` is no float tensor, or an option is unknown.
        RuntimeError: ``"native"`` was asked for and the fused stack cannot serve.
    """
    check_names(options)
    _inputs.check_options(penalty, 1, "gaussian", False, "mean", implementation)
    _inputs.check_x(x)
    own_call = forward is not None or output is not None
    path = _path.choose(model, x, penalty, implementation, _functional.needed(), own_call)
    if isinstance(path, Path):
        return path
    return Path("fused", "the model is a stack of Linear and activation layers")


_OPTIONS = {
    name
    for name, parameter in inspect.signature(grokalign).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def check_names(options: dict[str, Any]) -> None:
    """Requires names of options that ``grokalign`` has."""
    if unknown := set(options) - _OPTIONS:
        msg = f"unknown option {min(unknown)!r}; grokalign has {', '.join(sorted(_OPTIONS))}"
        raise TypeError(msg)


def _handle(generator: torch.Generator | ProbeStream | None) -> int:
    """The number by which a compiled graph knows a stream."""
    if generator is None:
        return _probes.DEFAULT_HANDLE
    if isinstance(generator, ProbeStream):
        return generator.handle
    msg = (
        "generator= cannot be used inside torch.compile: leave it out, draw probe_vectors "
        "outside, or use GrokAlignLoss, which has a stream of its own"
    )
    raise ValueError(msg)
