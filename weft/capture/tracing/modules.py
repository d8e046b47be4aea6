"""Modules that carry what a graph of the forward cannot hold: backward hooks, old reparametrisations, TorchScript.

Enters: the module, before it is traced. Leaves: nothing, or a `CaptureError` that names the sub-module. The same for
what forward does to a module as a whole (`to_where_it_is`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from weft.capture.source import place_here
from weft.errors import CaptureError

NEW_STYLE = "use torch.nn.utils.parametrizations.{} instead, which keeps the same parameters in a form that is captured"


def refuse_modules(module: nn.Module) -> None:
    """Raise if a sub-module or parameter cannot be captured whatever its forward does."""
    for path, sub in module.named_modules():
        label = f"{path} ({type(sub).__name__})" if path else type(sub).__name__
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
        for hook in vars(sub)["_forward_pre_hooks"].values():
            refuse_reparametrisation(hook, path, label)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} has gradient hooks, which are not captured",
                place=f"parameter {name}",
                remedy="remove them before capture (handle.remove())",
            )


def refuse_reparametrisation(hook: object, path: str, label: str) -> None:
    """Hooks that compute a weight before each forward and set it as a plain attribute."""
    if isinstance(hook, WeightNorm):
        what, remedy = "torch.nn.utils.weight_norm", NEW_STYLE.format("weight_norm")
    elif isinstance(hook, SpectralNorm):
        what, remedy = "torch.nn.utils.spectral_norm", NEW_STYLE.format("spectral_norm")
    elif isinstance(hook, prune.BasePruningMethod):
        what = "torch.nn.utils.prune"
        remedy = "torch.nn.utils.prune.remove(module, name) before capture, or torch.nn.utils.parametrize with the mask"
    else:
        return
    raise CaptureError(
        f"the module {label} has a weight from {what}, which sets it anew as an attribute in every forward",
        place=f"module {path or 'itself'}",
        remedy=remedy,
    )


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
