"""Modules that carry what a graph of the forward cannot hold: backward hooks, TorchScript, parameters without a shape.

Enters: the module, before it is traced. Leaves: nothing, a warning (of forward hooks), or a `CaptureError` that names
the sub-module. The same for what forward does to a module as a whole (`to_where_it_is`). Weights that torch's hooks
compute before each forward are taken away while it is traced (`without_computed`), so that they are what the hooks
compute.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from weft.capture.source import is_own, place_here
from weft.errors import CaptureError


def refuse_modules(module: nn.Module) -> None:
    """Raise if a sub-module or parameter cannot be captured whatever its forward does."""
    for path, sub in module.named_modules():
        label = label_of(path, sub)
        if isinstance(sub, torch.jit.ScriptModule):
            raise CaptureError(
                f"the module {label} was compiled by torch.jit: its operators cannot be seen",
                place=f"module {path or 'itself'}",
                remedy="capture the plain module, without torch.jit.script or torch.jit.trace",
            )
        if vars(sub)["_backward_hooks"] or vars(sub)["_backward_pre_hooks"]:
            raise CaptureError(
                f"the module {label} has backward hooks, which are not captured",
                place=f"module {path or 'itself'}",
                remedy="remove them before capture (handle.remove()); to change gradients, put an autograd.Function "
                "into forward",
            )
        if any(map(is_lazy, (*vars(sub)["_parameters"].values(), *vars(sub)["_buffers"].values()))):
            raise CaptureError(
                f"the module {label} has parameters without a shape: they get one in its first forward",
                place=f"module {path or 'itself'}",
                remedy="run forward once, model(*example), or name the sizes (nn.Linear instead of nn.LazyLinear)",
            )
    found = (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    if hook := next(filter(is_own_hook, found), None):
        raise CaptureError(
            f"the hook {hook_name(hook)} of all modules (register_module_forward_hook) would be frozen into the "
            "program",
            remedy="remove it before capture (handle.remove())",
        )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} has gradient hooks, which are not captured",
                place=f"parameter {name}",
                remedy="remove them before capture (handle.remove())",
            )


def label_of(path: str, sub: nn.Module) -> str:
    return f"{path} ({type(sub).__name__})" if path else type(sub).__name__


def warn_of_hooks(module: nn.Module) -> None:
    """Forward hooks of the user's own code run while forward is traced: what they compute is computed ever after."""
    for path, sub in module.named_modules():
        for hook in (*vars(sub)["_forward_pre_hooks"].values(), *vars(sub)["_forward_hooks"].values()):
            if is_own_hook(hook):
                warnings.warn(
                    f"the hook {hook_name(hook)} of the module {label_of(path, sub)} becomes a part of the program: to "
                    "remove it later has no effect",
                    stacklevel=2,
                )


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is written in the user's own code, neither by torch nor in an installed package."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    code = getattr(function, "__code__", None) or getattr(vars(type(hook)).get("__call__"), "__code__", None)
    return code is not None and is_own(code.co_filename)


def hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def computed_attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Attributes that hooks of torch compute from parameters before each forward: of `torch.nn.utils.weight_norm`,
    `spectral_norm` and `prune`. No forward reads what the one before has left there."""
    for sub in module.modules():
        for hook in vars(sub)["_forward_pre_hooks"].values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                yield sub, hook.name
            elif isinstance(hook, prune.BasePruningMethod):
                yield sub, hook._tensor_name


@contextmanager
def without_computed(module: nn.Module) -> Iterator[None]:
    """While this is entered, such attributes exist from the hook on only: a forward that reads one before fails."""
    taken = [(sub, name, vars(sub).pop(name)) for sub, name in computed_attributes(module) if name in vars(sub)]
    try:
        yield
    finally:
        for sub, name, value in taken:
            vars(sub)[name] = value


def to_where_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Stands in for `Module.to` in a traced forward: nothing to do, or refused."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    for held in (*module.parameters(), *module.buffers()):
        is_cast = dtype is not None and held.is_floating_point() and held.dtype != dtype
        if is_cast or (device is not None and held.device.type != device.type):
            raise CaptureError(
                f"forward moves or casts the parameters of {type(module).__name__}",
                place=place_here(),
                remedy="do it before training, outside forward",
            )
    return module
