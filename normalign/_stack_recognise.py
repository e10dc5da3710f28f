"""Recognises stacks of Linear and activation layers.

A stack is an ``nn.Sequential`` (nested at will), or a module whose forward pass torch.fx traces to
the same chain. Everything that could make a fused run differ from calling the model (hooks,
parametrizations, subclasses) is a reason against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_MAX_LAYERS = 32
# Must agree with the enumeration in csrc/grokalign_stack.h.
IDENTITY, RELU, LEAKY = range(3)
_SQUARE, _GELU, _GELU_TANH, _SILU, _TANH, _SIGMOID, _SOFTPLUS = range(3, 10)
_Activation = tuple[int, float, float]


@dataclass(frozen=True)
class Chain:
    """The linear layers of a model in order, and the activation behind each."""

    linears: tuple[nn.Linear, ...]
    activations: tuple[_Activation, ...]
    flatten: bool
    dropouts: tuple[nn.Module, ...]

    @property
    def piecewise_linear(self) -> bool:
        """Whether the offset ``f(x) - J x`` is the biases' way through the active pieces."""
        return all(kind in (IDENTITY, RELU, LEAKY) for kind, _, _ in self.activations)

    @property
    def homogeneous(self) -> bool:
        """Whether ``f(t x) = t^k f(x)`` for ``t > 0``, so that ``J x = k f(x)``."""
        kinds = {kind for kind, _, _ in self.activations}
        return kinds <= {IDENTITY, RELU, LEAKY, _SQUARE} and all(
            m.bias is None for m in self.linears
        )


def _activation_of(module: nn.Module) -> _Activation | None:
    kind = type(module)
    if kind in (nn.ReLU, nn.Identity):
        return (RELU if kind is nn.ReLU else IDENTITY, 0.0, 0.0)
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return (LEAKY, float(module.negative_slope), 0.0)
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return (_GELU if module.approximate == "none" else _GELU_TANH, 0.0, 0.0)
    if isinstance(module, nn.Softplus) and kind is nn.Softplus:
        return (_SOFTPLUS, float(module.beta), float(module.threshold))
    simple = {nn.SiLU: _SILU, nn.Tanh: _TANH, nn.Sigmoid: _SIGMOID}
    return (simple[kind], 0.0, 0.0) if kind in simple else None


def hook_reason(module: nn.Module) -> str | None:
    """Hooks see or change tensors that the fused path never makes."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return f"{type(module).__name__} has hooks"
    return None


class _Builder:
    """Collects layers in order; ``reason`` is set by the first that does not fit."""

    def __init__(self) -> None:
        self.linears: list[nn.Linear] = []
        self.activations: list[_Activation] = []
        self.pending: _Activation | None = None
        self.flatten = False
        self.dropouts: list[nn.Module] = []
        self.reason: str | None = None

    def module(self, module: nn.Module) -> None:
        if self.reason is None:
            self.reason = hook_reason(module)
        if self.reason is not None:
            return
        kind = type(module)
        if kind is nn.Linear:
            self.linear(module)  # type: ignore[arg-type]
        elif kind is nn.Flatten:
            assert isinstance(module, nn.Flatten)
            self.flattening(module.start_dim, module.end_dim)
        elif kind is nn.Dropout:
            self.dropouts.append(module)
        elif kind is nn.Identity:
            pass
        else:
            found = _activation_of(module)
            if found is None:
                self.reason = f"{kind.__name__} is not a layer of a fused stack"
            else:
                self.activation(found)

    def linear(self, module: nn.Linear) -> None:
        if self.linears:
            self.activations.append(self.pending or (IDENTITY, 0.0, 0.0))
        elif self.pending is not None:
            self.reason = "an activation comes before the first Linear"
        self.pending = None
        self.linears.append(module)

    def flattening(self, start: int, end: int) -> None:
        if self.linears:
            self.reason = "a Flatten comes after the first Linear"
        elif (start, end) != (1, -1):
            self.reason = f"Flatten({start}, {end}) is not Flatten(1, -1)"
        self.flatten = True

    def activation(self, activation: _Activation) -> None:
        if self.pending is not None:
            self.reason = "two activations follow each other"
        self.pending = activation

    def chain(self) -> Chain | str:
        if self.reason is not None:
            return self.reason
        if not self.linears:
            return "the model has no Linear layer"
        if self.pending is not None:
            return "an activation comes after the last Linear"
        if len(self.linears) > _MAX_LAYERS:
            return f"the stack has more than {_MAX_LAYERS} Linear layers"
        self.activations.append((IDENTITY, 0.0, 0.0))
        return Chain(
            tuple(self.linears), tuple(self.activations), self.flatten, tuple(self.dropouts)
        )


def _walk(model: nn.Sequential, builder: _Builder) -> None:
    for child in model._modules.values():
        assert child is not None
        if type(child) is nn.Sequential:
            builder.reason = builder.reason or hook_reason(child)
            _walk(child, builder)
        else:
            builder.module(child)


_FUNCTIONS: dict[Any, int] = {
    torch.relu: RELU,
    torch.nn.functional.relu: RELU,
    torch.tanh: _TANH,
    torch.sigmoid: _SIGMOID,
    torch.square: _SQUARE,
    torch.nn.functional.silu: _SILU,
    torch.nn.functional.tanh: _TANH,
    torch.nn.functional.sigmoid: _SIGMOID,
    "relu": RELU,
    "tanh": _TANH,
    "sigmoid": _SIGMOID,
    "square": _SQUARE,
}


def _node_activation(node: fx.Node) -> _Activation | None:
    target, args, kwargs = node.target, node.args, node.kwargs
    name = getattr(target, "__name__", target)
    if name == "gelu" and len(args) == 1 and set(kwargs) <= {"approximate"}:
        tanh = kwargs.get("approximate", "none") == "tanh"
        return (_GELU_TANH if tanh else _GELU, 0.0, 0.0)
    if name == "leaky_relu" and set(kwargs) <= {"negative_slope", "inplace"}:
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
        return (LEAKY, float(slope), 0.0) if isinstance(slope, float) else None
    if name == "pow" and len(args) == 2 and args[1] in (2, 2.0) and not kwargs:
        return (_SQUARE, 0.0, 0.0)
    if name == "mul" and len(args) == 2 and args[0] is args[1] and not kwargs:
        return (_SQUARE, 0.0, 0.0)
    if target in _FUNCTIONS and len(args) == 1 and set(kwargs) <= {"inplace"}:
        return (_FUNCTIONS[target], 0.0, 0.0)
    return None


class _Tracer(fx.Tracer):
    """Leaves every module of torch.nn whole; goes into the user's own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m.__module__.startswith("torch.nn") and type(m) is not nn.Sequential


def _trace(model: nn.Module, builder: _Builder) -> None:
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        first = str(error).splitlines()[:1] or [""]
        builder.reason = f"torch.fx cannot trace the model: {first[0][:120]}"
        return
    previous: fx.Node | None = None
    for node in graph.nodes:
        if builder.reason is not None:
            return
        if node.op == "placeholder":
            if previous is not None and node.args == ():
                builder.reason = "the model takes more than one input"
            previous = previous or node
            continue
        if node.op == "output":
            if node.args != (previous,):
                builder.reason = "the model returns more than the last layer's output"
            return
        if any(n is not previous for n in node.all_input_nodes):
            builder.reason = "the model is not a chain of layers"
        elif node.op == "call_module":
            builder.module(model.get_submodule(str(node.target)))
        elif found := _node_activation(node):
            builder.activation(found)
        elif getattr(node.target, "__name__", node.target) == "flatten":
            values = [*node.args[1:], *node.kwargs.values()]
            builder.flattening(*[*values, -1][:2] if values else (0, -1))
        else:
            builder.reason = f"{node.target} is not a layer of a fused stack"
        previous = node


def recognise(model: nn.Module) -> Chain | str:
    builder = _Builder()
    for module in model.modules():
        builder.reason = builder.reason or hook_reason(module)
    if builder.reason is None:
        own = any(not type(m).__module__.startswith("torch.nn") for m in model.modules())
        if type(model) is nn.Sequential and not own:
            _walk(model, builder)
        elif type(model) is nn.Linear:
            builder.module(model)
        else:
            _trace(model, builder)
    return builder.chain()
