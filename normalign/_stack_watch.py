"""Notices that a recognised model is no longer what it was when it was recognised.

A user's ``forward`` is traced once, and its graph used from then on. What it may branch on is
watched: the attributes, class attributes, globals and closures that its code names.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MOST_FUNCTIONS = 64
_MISSING = object()


class Unwatchable(Exception):
    """Something that the forward pass reads, and whose changes could not be noticed."""


def is_own(module: nn.Module) -> bool:
    """Whether the module's class is not one of torch's layers."""
    return not type(module).__module__.startswith("torch.nn")


def mark_of(value: Any, depth: int = 4) -> Any:
    """Something that compares equal later if and only if the value is unchanged.

    It keeps no object alive that could lead back to the model.
    """
    if isinstance(value, (*_SIMPLE, enum.Enum)):
        return value
    if isinstance(value, (*_FUNCTIONS, type, types.ModuleType, nn.Module)):
        return weakref.ref(value)
    if isinstance(value, types.MethodType):  # made anew by every look at it
        return weakref.ref(value.__func__), id(value.__self__)
    if isinstance(value, Tensor):
        return weakref.ref(value), 0 if value.is_inference() else value._version
    if depth:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(mark_of(v, depth - 1) for v in value)
        if isinstance(value, dict):
            items = value.items()
            return type(value), tuple((mark_of(k, 0), mark_of(v, depth - 1)) for k, v in items)
        if isinstance(value, (set, frozenset)) and all(isinstance(v, _SIMPLE) for v in value):
            return frozenset(value)
        if hasattr(value, "__dict__"):
            return type(value), mark_of(vars(value), depth - 1)
    raise Unwatchable(type(value).__name__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


class _Reads:
    """What the code of a module's forward pass names, and the functions that it calls."""

    def __init__(self, module: nn.Module) -> None:
        kind = type(module)
        self.names: set[str] = set()
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.cells: list[Any] = []
        pending: list[Any] = [kind.forward]
        seen: list[Any] = []
        while pending:
            function = pending.pop()
            if isinstance(function, property):
                function = function.fget
            elif isinstance(function, types.MethodType):
                function = function.__func__
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            if len(seen) == _MOST_FUNCTIONS:
                raise Unwatchable("long chain of functions")
            seen.append(function)
            for cell in function.__closure__ or ():
                self.cells.append(cell)
                pending.append(_content(cell))
            if (function.__module__ or "").startswith("torch."):
                continue
            for code in _codes(function.__code__):
                strings = {c for c in code.co_consts if isinstance(c, str)}  # getattr(self, "act")
                for name in {*code.co_names, *strings} - self.names:
                    self.names.add(name)
                    pending += (module.__dict__.get(name), getattr(kind, name, None))
                for name in code.co_names:
                    if name in function.__globals__:
                        self.globals.append((function.__globals__, name))
                        pending.append(function.__globals__[name])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


class Watch:
    """One module of a recognised model, with everything that recognition saw of it.

    Args:
        module: Any part of the model.
        called: Whether its own forward pass was traced, and what that reads matters.

    Raises:
        Unwatchable: the module's forward pass reads something that cannot be watched.
    """

    __slots__ = ("_children", "_hooked", "_kind", "_module", "_parameters", "_reads", "_settings")

    def __init__(self, module: nn.Module, called: bool) -> None:
        self._module = weakref.ref(module)  # not the module: the model could never be freed
        self._kind = type(module)
        self._parameters = id(module._parameters)
        self._children = [m if m is None else weakref.ref(m) for m in module._modules.values()]
        self._reads = _Reads(module) if called and is_own(module) else None
        self._hooked = _hooked(module.__dict__)
        self._settings = self._look(module)

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        module = self._module()
        if module is None or type(module) is not self._kind:
            return False
        f = module.__dict__
        children = f["_modules"]
        if children or self._children:
            if len(children) != len(self._children):
                return False
            for child, known in zip(children.values(), self._children, strict=True):
                if child is not (known if known is None else known()):
                    return False
        if _hooked(f) is not self._hooked or id(f["_parameters"]) != self._parameters:
            return False
        try:
            found: bool = self._look(module) == self._settings
        except Unwatchable:
            return False
        return found

    def _look(self, module: nn.Module) -> list[Any] | None:
        f = module.__dict__
        if self._reads is not None:
            return self._read(module, f)
        if self._kind is nn.Linear:
            return [None if p is None else p.shape for p in f["_parameters"].values()]
        if "negative_slope" in f or "approximate" in f or "threshold" in f:
            return [f.get(k) for k in ("negative_slope", "approximate", "threshold", "beta")]
        return None

    def _read(self, module: nn.Module, f: dict[str, Any]) -> list[Any]:
        reads, kind = self._reads, self._kind
        assert reads is not None
        marks: list[Any] = [module.training, weakref.ref(kind.forward)]
        for name in reads.names:
            if name in f:
                marks.append(_named(name, f[name]))
            elif name in f["_buffers"]:
                marks.append(mark_of(f["_buffers"][name]))
            elif (value := getattr(kind, name, _MISSING)) is not _MISSING:
                marks.append(value if type(value) in _SIMPLE else _class_mark(name, value))
        marks += [_named(name, place.get(name)) for place, name in reads.globals]
        marks += [_named("a closure", _content(cell)) for cell in reads.cells]
        return marks


def _hooked(f: dict[str, Any]) -> bool:
    return bool(
        f["_forward_hooks"]
        or f["_forward_pre_hooks"]
        or f["_backward_hooks"]
        or f["_backward_pre_hooks"]
        or "forward" in f
    )


def _class_mark(name: str, value: Any) -> Any:
    # Properties, slots and other descriptors: their own identity is all that can change.
    if hasattr(type(value), "__get__") and not isinstance(value, (*_FUNCTIONS, types.MethodType)):
        return id(value)
    return _named(name, value)


def _named(name: str, value: Any) -> Any:
    try:
        return mark_of(value)
    except (Unwatchable, TypeError) as error:
        msg = f"{name}, a {type(value).__name__}"
        raise Unwatchable(msg) from error
