"""Calls of what the user has made: autograd functions, registered functions, operators of torch libraries.

In: an op and the text of its arguments. Out: the call as an expression, and on the Sheet whatever the file needs to
reach the function: an import, or a line that takes it out of the model file. A function that another process could not
find is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils import _pytree as pytree

from weft.codegen.sheet import Sheet
from weft.codegen.text import literal
from weft.errors import WeftError
from weft.ir.graph import Op
from weft.runtime.operators.custom import CustomOp

MODEL_FILE = "weft_model_file_"
"""How the modules are called that model files become: no other process could import one by that name."""
TORCH_LIBRARIES = frozenset({"aten", "prims", "prim", "inductor"})
"""Libraries of operators that are there wherever torch is."""


def opaque(sheet: Sheet, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], show: Callable[[Any], str]) -> str:
    """A call of the function behind an op."""
    applied: Any = op.function
    function = getattr(applied, "cls", applied)
    _reach(sheet, op, function)

    def call(positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        words = [*map(show, positional), *(f"{name}={show(value)}" for name, value in named.items())]
        return f"{function.__qualname__}({', '.join(words)})"

    if function is applied:
        return call(args, kwargs)
    tree = pytree.tree_unflatten(list(args), applied.spec)
    if isinstance(function, CustomOp):
        positional, named = tree
        text = call(positional, {**named, **kwargs})
    else:
        text = f"{function.__qualname__}.apply({', '.join(map(show, tree))})"
    if not applied.nested:
        return text
    sheet.need("weft.runtime.operators.custom", {"tensors_in"})
    return f"tensors_in({text})"


def called(sheet: Sheet, op: Op, function: Callable[..., Any], words: Sequence[str]) -> str:
    """A call of the function that an algorithm of the user's runs in place of the op."""
    _reach(sheet, op, function)
    return f"{function.__qualname__}({', '.join(words)})"


def need_operator(sheet: Sheet, op: Op, target: str) -> None:
    """Make sure that an operator of a user's torch library is there when the program runs."""
    library, name, _ = target.split(".")
    if library not in TORCH_LIBRARIES:
        sheet.need("weft.runtime.operators.custom", {"need_operator"})
        home = literal(_home_of(f"{library}::{name}", op))
        sheet.definitions[target] = f"need_operator({literal(f'{library}.{name}')}, {home})"


def _reach(sheet: Sheet, op: Op, function: Any) -> None:
    """Make a function reachable from the file: imported, or taken out of the model file."""
    root = function.__qualname__.split(".")[0]
    is_script = function.__module__ == "__main__"
    if "<locals>" in function.__qualname__ or (is_script and not Path(_file_of(function)).is_file()):
        raise WeftError(
            f"the function behind {op.name} cannot be imported from a generated program",
            place=op.place,
            remedy="define it at the top of a file: a script, or a module that can be imported",
        )
    if is_script or function.__module__.startswith(MODEL_FILE):
        sheet.need("weft.runtime.operators.custom", {"defined_in"})
        sheet.definitions[root] = f"{root} = defined_in({literal(_file_of(function))}, {literal(root)})"
    else:
        sheet.need(function.__module__, {root})


def _file_of(function: Any) -> str:
    """The file that a function or class was defined in, also if its module is no longer loaded."""
    plain = function.function if isinstance(function, CustomOp) else getattr(function, "forward", function)
    return str(Path(plain.__code__.co_filename).resolve())


def _home_of(name: str, op: Op) -> str:
    """The module, file or shared library to load for an operator; the file that calls it, if nothing says better."""
    defined = OPDEFS.get(name)
    if defined is not None and not defined._init_fn.__module__.startswith((MODEL_FILE, "__main__")):
        return str(defined._init_fn.__module__)
    if defined is not None:
        return str(Path(defined._init_fn.__code__.co_filename).resolve())
    if len(torch.ops.loaded_libraries) == 1:
        return str(next(iter(torch.ops.loaded_libraries)))
    files = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    return files.get(op.source.file) or str(Path(op.source.file).resolve())
