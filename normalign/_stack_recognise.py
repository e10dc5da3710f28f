"""Recognises stacks of Linear and activation layers.

A stack is an ``nn.Sequential`` (nested at will), or a module whose forward pass torch.fx traces to
the same chain. Everything that could make a fused run differ from calling the model (hooks,
parametrizations, subclasses) is a reason against it.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from normalign._stack_watch import is_own

_MAX_LAYERS = 32
# Must agree with the enumeration in csrc/grokalign_stack.h.
IDENTITY, RELU, LEAKY = range(3)
_SQUARE, _GELU, _GELU_TANH, _SILU, _TANH, _SIGMOID, _SOFTPLUS = range(3, 10)
_Activation = tuple[int, float, float]


class Layer:
    """The parameters of a Linear layer; they are read anew for each step.

    Not the module itself: it may be the model, which what is known of it must not keep alive.
    """

    __slots__ = ("_parameters",)

    def __init__(self, module: nn.Linear) -> None:
        self._parameters = module._parameters

    @property
    def weight(self) -> Tensor:
        """Shape ``(out, in)``."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Shape ``(out,)``."""
        return self._parameters["bias"]


@dataclass(frozen=True)
class Chain:
    """The linear layers of a model in order, and the activation behind each."""

    linears: tuple[Layer, ...]
    widths: tuple[int, ...]
    activations: tuple[_Activation, ...]
    flatten: bool
    dropouts: tuple[dict[str, Any], ...]

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


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs before or after the module's forward or backward pass."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def hook_reason(module: nn.Module) -> str | None:
    """Hooks see or change tensors that the fused path never makes; so may a changed call."""
    if "forward" in module.__dict__ or type(module).__call__ is not nn.Module.__call__:
        return f"{type(module).__name__} is not called as its class says"
    if has_hooks(module):
        return f"{type(module).__name__} has hooks"
    return None


class _Builder:
    """Collects layers in order; ``reason`` is set by the first that does not fit."""

    def __init__(self) -> None:
        self.linears: list[Layer] = []
        self.widths: list[int] = []
        self.activations: list[_Activation] = []
        self.pending: _Activation | None = None
        self.flatten = False
        self.dropouts: list[dict[str, Any]] = []
        self.reason: str | None = None
        self.called: list[nn.Module] = []  # modules whose forward pass was traced

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
            self.dropouts.append(module.__dict__)
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
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if weight is None or "bias" not in module._parameters:
            self.reason = "a weight or bias of a Linear is no parameter"
            return
        shape = tuple(weight.shape)
        fits = len(shape) == 2 and min(shape) > 0 and (bias is None or bias.shape == shape[:1])
        if not fits or (self.widths and self.widths[-1] != shape[1]):
            self.reason = f"the shape {shape} of a weight fits no stack"
            return
        self.widths = [*(self.widths or shape[1:]), shape[0]]
        self.linears.append(Layer(module))

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
            tuple(self.linears),
            tuple(self.widths),
            tuple(self.activations),
            self.flatten,
            tuple(self.dropouts),
        )


def _walk(model: nn.Sequential, builder: _Builder) -> None:
    for child in model._modules.values():
        assert child is not None
        if type(child) is nn.Sequential:
            builder.reason = builder.reason or hook_reason(child)
            _walk(child, builder)
        else:
            builder.module(child)


_F = torch.nn.functional
_FUNCTIONS: dict[Any, int] = {
    torch.relu: RELU,
    _F.relu: RELU,
    torch.tanh: _TANH,
    torch.sigmoid: _SIGMOID,
    torch.square: _SQUARE,
    _F.silu: _SILU,
    _F.tanh: _TANH,
    _F.sigmoid: _SIGMOID,
    "relu": RELU,
    "tanh": _TANH,
    "sigmoid": _SIGMOID,
    "square": _SQUARE,
}
_POWERS = (operator.pow, torch.pow, "pow")
_PRODUCTS = (operator.mul, torch.mul, "mul")


def _node_activation(node: fx.Node) -> _Activation | None:
    target, args, kwargs = node.target, node.args, node.kwargs
    if target is _F.gelu and len(args) == 1 and set(kwargs) <= {"approximate"}:
        tanh = kwargs.get("approximate", "none") == "tanh"
        return (_GELU_TANH if tanh else _GELU, 0.0, 0.0)
    if target is _F.leaky_relu and set(kwargs) <= {"negative_slope", "inplace"}:
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
        return (LEAKY, float(slope), 0.0) if isinstance(slope, float) else None
    if target in _POWERS and len(args) == 2 and args[1] in (2, 2.0) and not kwargs:
        return (_SQUARE, 0.0, 0.0)
    if target in _PRODUCTS and len(args) == 2 and args[0] is args[1] and not kwargs:
        return (_SQUARE, 0.0, 0.0)
    if target in _FUNCTIONS and len(args) == 1 and set(kwargs) <= {"inplace"}:
        return (_FUNCTIONS[target], 0.0, 0.0)
    return None


class _Tracer(fx.Tracer):
    """Leaves every module of torch.nn whole; goes into the user's own."""

    def __init__(self, called: list[nn.Module]) -> None:
        super().__init__()
        self.called = called

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not is_own(m) and type(m) is not nn.Sequential

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Notes which modules take part."""
        self.called.append(m)
        return super().call_module(m, *args, **kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuses what a graph does not record: modes that the forward pass changes."""
        if not torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            msg = "the forward pass changes the gradient mode or autocast"
            raise RuntimeError(msg)
        return super().create_node(*args, **kwargs)


class _Before:
    """What the modules and the random state were before a forward pass was traced."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.fields = [dict(m.__dict__) for m in self.modules]
        own = (m for m in self.modules if is_own(m))
        held = [v for m in own for v in (*m.__dict__.values(), *m._buffers.values())]
        self.tensors = [(t, t._version, t.clone()) for t in held if _is_plain(t)]
        containers = (v for f in self.fields for v in f.values() if type(v) in (list, dict, set))
        self.contents = [(c, _content(c)) for c in containers]
        self.draws = torch.get_rng_state(), random.getstate()

    def restore(self) -> str | None:
        """Undoes what the forward pass did, and says what it was."""
        effect = None
        for module, fields in zip(self.modules, self.fields, strict=True):
            now = module.__dict__
            if not _same([*now, *now.values()], [*fields, *fields.values()]):
                effect = "changes attributes"
                now.clear()
                now.update(fields)
        for container, content in self.contents:
            if not _same(_content(container), content):
                effect = "changes a list, a dict or a set"
                container.clear()
                if type(container) is dict:
                    half = len(content) // 2
                    container.update(zip(content[:half], content[half:], strict=True))
                else:
                    (container.extend if type(container) is list else container.update)(content)
        for tensor, version, values in self.tensors:
            if tensor._version != version:
                effect = "changes a tensor"
                with torch.no_grad():
                    tensor.copy_(values)
        if not torch.equal(torch.get_rng_state(), self.draws[0]):
            effect = "draws random numbers"
            torch.set_rng_state(self.draws[0])
        if random.getstate() != self.draws[1]:
            effect = "draws random numbers"
            random.setstate(self.draws[1])
        return effect


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and not value.is_inference()


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if type(container) is dict else list(container)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _trace(model: nn.Module, builder: _Builder) -> None:
    before = _Before(model)
    try:
        with torch.enable_grad():
            graph = _Tracer(builder.called).trace(model)
    except Exception as error:
        before.restore()
        first = str(error).splitlines()[:1] or [""]
        builder.reason = f"torch.fx cannot trace the model: {first[0][:120]}"
        return
    if effect := before.restore():
        builder.reason = f"its forward pass {effect}"
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
        elif node.target in (torch.flatten, "flatten"):
            values = [*node.args[1:], *node.kwargs.values()]
            builder.flattening(*[*values, -1][:2] if values else (0, -1))
        else:
            builder.reason = f"{node.target} is not a layer of a fused stack"
        previous = node


def recognise(model: nn.Module) -> tuple[Chain | str, list[nn.Module]]:
    """The model's chain of layers, or why there is none; and the modules whose code says so."""
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
            builder.called.append(model)
            _trace(model, builder)
    return builder.chain(), builder.called
