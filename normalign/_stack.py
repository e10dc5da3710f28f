"""The fused GrokAlign path for stacks of Linear and activation layers."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from normalign import _dispatch, _gpu, _load, _stack_cuda
from normalign._stack_cuda import GpuStack
from normalign._stack_native import PENALTIES, Criterion, FusedStack, Loss
from normalign._stack_recognise import Chain, recognise
from normalign._stack_watch import Unwatchable, Watch


class StackPlan:
    """A recognised stack, with what is needed to run it."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._fused: dict[str, FusedStack | GpuStack] = {}
        self.outputs = chain.widths[-1]  # probes are drawn before the forward pass

    def run(self, x: Tensor, probes: Tensor, penalty: str, reduction: str) -> tuple[Tensor, Tensor]:
        """Logits ``(B, c)`` and the penalty: a scalar for ``"mean"``, ``(B,)`` for ``"none"``.

        ``probes`` has shape ``(P, B, c)``; the penalty is the mean over the P probes. Gradients are
        first order: a second backward through them raises.
        """
        if x.dim() > 2:
            x = x.flatten(1)
        if _gpu.serves(x.device):
            return self._on_gpu()(x, probes, penalty, reduction)
        return self._on_cpu(penalty)(x, probes, reduction)

    def takes(self, criterion: Criterion, x: Tensor, penalty: str) -> bool:
        """Whether the target has the form that the kernels read; else torch shall judge it."""
        target = criterion.target
        if target.device != x.device or target.requires_grad:
            return False
        if _gpu.serves(x.device):
            if not self._on_gpu().small(x, penalty):
                return False
        elif not x.is_cpu:
            return False
        if criterion.kind == "cross_entropy":
            return target.dtype is torch.int64 and target.shape == x.shape[:1]
        return target.dtype is x.dtype and target.shape == (x.shape[0], self.outputs)

    def loss(self, x: Tensor, probes: Tensor, penalty: str, criterion: Criterion) -> Loss:
        """``task + weight * penalty`` with the task loss computed by the kernels too.

        Raises:
            IndexError: a target class is out of range; nothing was computed. On a GPU, where to
                look would be to wait, the loss is NaN instead.
        """
        if x.dim() > 2:
            x = x.flatten(1)
        if _gpu.serves(x.device):
            return self._on_gpu().loss(x, probes, penalty, criterion)
        return self._on_cpu(penalty).loss(x, probes, criterion)

    def _on_cpu(self, penalty: str) -> FusedStack:
        if penalty not in self._fused:
            self._fused[penalty] = FusedStack(self.chain.linears, self.chain.activations, penalty)
        found = self._fused[penalty]
        assert isinstance(found, FusedStack)
        return found

    def _on_gpu(self) -> GpuStack:
        if "gpu" not in self._fused:
            self._fused["gpu"] = GpuStack(self.chain.linears, self.chain.activations)
        found = self._fused["gpu"]
        assert isinstance(found, GpuStack)
        return found


class _Entry:
    """What was found for one model, and what must not change for it to stay true."""

    def __init__(self, model: nn.Module) -> None:
        self.found, called = recognise(model)
        known = {id(m) for m in called}
        self.watches = []
        for module in model.modules():
            try:
                self.watches.append(Watch(module, id(module) in known))
            except Unwatchable as error:
                self.watches.append(Watch(module, False))
                self.found = f"changes of what the forward pass reads cannot be noticed: {error}"
        self.plan = None if isinstance(self.found, str) else StackPlan(self.found)


_entries: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


def plan(model: nn.Module, x: Tensor, penalty: str) -> StackPlan | str:
    """The plan for this model and input, or the reason why the general path must serve."""
    if _gpu.serves(x.device):
        if reason := _dispatch.gpu_unavailable_reason(x):
            return reason
        if penalty not in _stack_cuda.PENALTIES:
            return f"the {penalty} penalty is not fused on a GPU"
    elif _load._C is None or x.device.type != "cpu" or x.dtype not in _dispatch.NATIVE_DTYPES:
        return _dispatch.unavailable_reason(x) or "no native kernel"
    entry = _entries.get(model)
    if entry is None or not all(watch.holds() for watch in entry.watches):
        entry = _Entry(model)
        _entries[model] = entry
    chain = entry.found
    if isinstance(chain, str):
        return chain
    reason = _input_reason(chain, x, penalty)
    if reason is not None:
        return reason
    assert entry.plan is not None
    return entry.plan


def _input_reason(chain: Chain, x: Tensor, penalty: str) -> str | None:
    if penalty not in PENALTIES:
        return f"the fused stack has no penalty {penalty!r}"
    if _has_any_global_hook():
        return "a global module hook is set"
    if x.requires_grad:
        return "the input requires a gradient"
    if x.dim() != 2 and not (chain.flatten and x.dim() > 2):
        return f"the input has {x.dim()} dimensions"
    if x.shape[0] == 0:
        return "the batch is empty"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if chain.dropouts and any(m["training"] and m["p"] > 0 for m in chain.dropouts):
        return "Dropout is active"
    if penalty == "joint" and not (chain.piecewise_linear or chain.homogeneous):
        return "the joint penalty's offset needs linear pieces, or squares without bias"
    if type(x) not in (Tensor, nn.Parameter):
        return f"the input is a {type(x).__name__}, a tensor subclass"
    for linear in chain.linears:
        for parameter in linear._parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or not parameter.is_contiguous():
                return "a weight is not a plain contiguous parameter"
            if parameter.dtype is not x.dtype or parameter.device != x.device:
                where = f"{parameter.dtype} on {parameter.device}"
                return f"a weight is {where}, unlike the input"
    features = x.shape[1] if x.dim() == 2 else x[0].numel()
    expected = chain.widths[0]
    if features != expected:
        return f"the input has {features} features, the first Linear takes {expected}"
    return None
