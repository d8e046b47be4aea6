"""Weft runs one single-device PyTorch model on many devices, to the same numbers.

Packages in flow order: capture (nn.Module -> Graph), ops (a Rule per Op), plan (Plan, primitives, recipes), cost, lower
(Plan -> Program, check), codegen (Program -> text), compile (the passes), runtime (what runs), verify (the same
numbers?), train, cli. Nouns are in ir.

Public names are resolved on first use, so that `import weft.runtime` loads neither the compiler nor a planner.
`weft.capture` and `weft.verify` are packages and functions at once: calling the package calls the function of its name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import errors as errors
    from weft.capture import capture as capture
    from weft.capture.example import dynamic as dynamic
    from weft.capture.precision import Precision as Precision
    from weft.errors import WeftError as WeftError
    from weft.ir.graph import Graph as Graph
    from weft.ir.layout import Layout as Layout
    from weft.ir.program import Program as Program
    from weft.plan import Plan as Plan
    from weft.plan import algorithm as algorithm
    from weft.plan import b as b
    from weft.plan import before as before
    from weft.plan import copy as copy
    from weft.plan import cut as cut
    from weft.plan import f as f
    from weft.plan import load_plan as load_plan
    from weft.plan import match as match
    from weft.plan import recompute as recompute
    from weft.plan import save_plan as save_plan
    from weft.plan import w as w
    from weft.runtime.operators.algorithms import Exchange as Exchange
    from weft.runtime.operators.algorithms import register_algorithm as register_algorithm
    from weft.runtime.operators.custom import register_op as register_op
    from weft.runtime.training.full_tensor import full_shape as full_shape
    from weft.runtime.training.full_tensor import full_tensor as full_tensor
    from weft.runtime.training.full_tensor import shard_like as shard_like
    from weft.runtime.training.reduction import per_token as per_token
    from weft.runtime.training.scaling import GradScaler as GradScaler
    from weft.train import clip_grad_norm_ as clip_grad_norm_
    from weft.train import load as load
    from weft.train import parallelize as parallelize
    from weft.train import save as save
    from weft.verify import verify as verify

__version__ = "0.1.0"

_PLAN = ("Plan", "match", "cut", "copy", "algorithm", "recompute", "before", "save_plan", "load_plan")
_EVENTS = ("f", "b", "w")
"""Reachable as `weft.f`, but no names for `from weft import *` to scatter."""
_EXPORTS = {
    "Graph": "weft.ir.graph",
    "Layout": "weft.ir.layout",
    "Program": "weft.ir.program",
    **dict.fromkeys((*_PLAN, *_EVENTS), "weft.plan"),
    **dict.fromkeys(("parallelize", "clip_grad_norm_", "save", "load"), "weft.train"),
    "WeftError": "weft.errors",
    "GradScaler": "weft.runtime.training.scaling",
    **dict.fromkeys(("full_tensor", "full_shape", "shard_like"), "weft.runtime.training.full_tensor"),
    "dynamic": "weft.capture.example",
    **dict.fromkeys(("register_algorithm", "Exchange"), "weft.runtime.operators.algorithms"),
    "register_op": "weft.runtime.operators.custom",
    "per_token": "weft.runtime.training.reduction",
    "Precision": "weft.capture.precision",
}
_CALLABLE = ("capture", "verify", "errors")

__all__ = [
    "__version__",
    "parallelize",
    "clip_grad_norm_",
    "full_tensor",
    "full_shape",
    "shard_like",
    "save",
    "load",
    "GradScaler",
    "Precision",
    "per_token",
    "dynamic",
    "register_op",
    "capture",
    "verify",
    "errors",
    "WeftError",
    "Plan",
    "match",
    "cut",
    "copy",
    "algorithm",
    "register_algorithm",
    "Exchange",
    "recompute",
    "before",
    "save_plan",
    "load_plan",
    "Graph",
    "Layout",
    "Program",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return importlib.import_module(f"weft.{name}")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallableModule(ModuleType):
    """A sub-package that can be called: `weft.verify(...)` is `weft.verify.verify(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.removeprefix("weft."))(*args, **kwargs)


class _Package(ModuleType):
    """Importing a sub-package sets it as an attribute here, at whatever moment: that is where it becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("capture", "verify") and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
