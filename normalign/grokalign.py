"""GrokAlign: logits and a Jacobian penalty from one shared forward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _dispatch, _general, _probes, _stack, reference
from normalign._checks import check_choice, check_count, check_shape

PENALTIES = ("orthogonal", "jacobian", "joint")
REDUCTIONS = ("mean", "none")
IMPLEMENTATIONS = ("auto", "native", "general", "reference")

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
    generator: torch.Generator | None = None,
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
            ``"reference"``, plain torch. ``NORMALIGN_IMPL=reference`` turns ``"auto"`` into
            ``"reference"``. ``normalign.explain`` tells which path a call takes.
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
    _check_options(penalty, num_probes, probes, exact, reduction, implementation, probe_vectors)
    check_input(x, check_finite)

    def make_probes(batch: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if probe_vectors is not None:
            return check_probes(probe_vectors, batch, outputs, device)
        dtype = torch.promote_types(dtype, torch.float32)
        if exact:
            return _probes.identity(batch, outputs, dtype, device)
        stream = generator or _probes.default_generator(device)
        return _probes.draw(probes, (num_probes, batch, outputs), dtype, device, stream)

    wanted = _wanted(implementation)
    if wanted in ("auto", "native"):
        plan = _fused(model, x, penalty, forward, output)
        if not isinstance(plan, str):
            vectors = make_probes(x.shape[0], plan.outputs, x.dtype, x.device)
            return plan.run(x, vectors, penalty, reduction)
        if wanted == "native":
            msg = f"the fused stack was asked for, but {plan}"
            raise RuntimeError(msg)

    def like(logits: Tensor) -> Tensor:
        batch, outputs = logits.shape
        return make_probes(batch, outputs, logits.dtype, logits.device)

    call = make_call(model, forward, output)
    if wanted == "reference":
        training = torch.is_grad_enabled()
        with _general.twice_differentiable():
            logits, value = reference.grokalign(call, x, like, penalty, reduction)
        return (logits, value) if training else (logits.detach(), value.detach())
    return _general.run(model, call, x, like, penalty, reduction)


def _fused(
    model: Any, x: Tensor, penalty: str, forward: Any, output: Output
) -> _stack.StackPlan | str:
    """The plan of the fused stack, or why it cannot serve."""
    if forward is not None or output is not None:
        return "forward= or output= is given"
    if not isinstance(model, nn.Module):
        return "the model is no nn.Module"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return _stack.plan(model, x, penalty)


def _wanted(implementation: str) -> str:
    if implementation == "auto" and _dispatch.implementation() == "reference":
        return "reference"
    return implementation


def _check_options(
    penalty: str,
    num_probes: int,
    probes: str,
    exact: bool,
    reduction: str,
    implementation: str,
    probe_vectors: Tensor | None,
) -> None:
    check_choice("penalty", penalty, PENALTIES)
    check_choice("probes", probes, _probes.KINDS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_count("num_probes", num_probes)
    if exact and (num_probes != 1 or probe_vectors is not None):
        msg = "exact uses every row of J: leave num_probes at 1 and probe_vectors at None"
        raise ValueError(msg)


def check_input(x: Tensor, check_finite: bool | None) -> None:
    """Requires a finite floating-point batch."""
    if not isinstance(x, Tensor):
        msg = f"x must be a torch.Tensor, got {type(x).__name__}"
        raise TypeError(msg)
    if not x.is_floating_point():
        msg = (
            f"x must have a floating-point dtype, got {x.dtype}. Integers have no gradient: pass "
            "what the model makes of them, such as token embeddings, as x, and let forward= run "
            "the rest of the model"
        )
        raise TypeError(msg)
    if x.dim() < 2 or x.shape[0] == 0:
        msg = f"x must have shape (batch, ...) with at least one sample, got {tuple(x.shape)}"
        raise ValueError(msg)
    if check_finite is None:
        check_finite = x.device.type == "cpu"
    # The sum is finite unless an entry is not, or it overflows: then look closely.
    if check_finite and not torch.isfinite(x.detach().sum()) and not torch.isfinite(x).all():
        msg = f"x must be finite, got {int((~torch.isfinite(x)).sum())} entries of NaN or infinity"
        raise ValueError(msg)


def check_probes(vectors: Tensor, batch: int, outputs: int, device: torch.device) -> Tensor:
    """Requires probes ``(P, B, c)`` on the device of the logits."""
    check_shape("probe_vectors", vectors, (None, batch, outputs))
    check_count("the first size of probe_vectors", vectors.shape[0])
    if vectors.device != device:
        msg = f"probe_vectors must be on the device of the logits, {device}, got {vectors.device}"
        raise ValueError(msg)
    return vectors.detach()


def make_call(
    model: Callable[..., Any], forward: Callable[[Any, Tensor], Any] | None, output: Output
) -> Callable[[Tensor], Tensor]:
    """The model as a function from ``x`` to logits."""
    if forward is None and output is None:
        return model

    def call(x: Tensor) -> Tensor:
        result = model(x) if forward is None else forward(model, x)
        if output is None:
            return result  # type: ignore[no-any-return]
        if callable(output):
            return output(result)  # type: ignore[no-any-return]
        if isinstance(output, str) and not isinstance(result, dict) and hasattr(result, output):
            return getattr(result, output)  # type: ignore[no-any-return]
        return result[output]  # type: ignore[no-any-return]

    return call
