"""register_op: a user's own function, or operator of a torch library, as one operator of the graph.

In: a Python function of tensors, and optionally the rule that says how it may be cut. Out: a CustomOp in its place:
called as ever, it calls the function; while a model is captured the call is kept whole, as one op. With an operator of
a torch library the statement is written on the operator itself. Whether a rule is right is not asked here but at its
first use, by the compiler, which this module does not need: the ranks of a job import it to call the function.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree

P = ParamSpec("P")
R = TypeVar("R")

STATED = "_weft_stated"
"""The attribute of a torch operator that holds what was stated of it."""


@dataclass(frozen=True)
class Stated:
    """What the user says of an operator.

    Args:
        rule: as text; empty if it is to be discovered.
        comm: names whose communicators the function takes, as the keyword argument `comm`.
        indices: names whose global indices the function takes, as the keyword argument `indices`.
        sizes: names whose whole sizes the function takes, as the keyword argument `sizes`.
        run: what a cell calls in place of the operator where a name of `comm`, `indices` or `sizes` is cut.
        place: the user's line.
    """

    rule: str = ""
    comm: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()
    place: str = ""
    sizes: tuple[str, ...] = ()
    run: Callable[..., Any] | None = None


class CustomOp:
    """A function that is one operator."""

    def __init__(self, function: Callable[..., Any], stated: Stated) -> None:
        functools.update_wrapper(self, function)
        self.function, self.stated = function, stated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> str:
        # by its name: what stands under the function's name is this object
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<weft operator {self.__module__}.{self.__qualname__}>"

    __name__: str
    __qualname__: str


@overload
def register_op(rule: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def register_op(
    rule: str | None = None, *, op: None = None, comm: str | Iterable[str] = (), indices: str | Iterable[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def register_op(rule: str | None = None, *, op: Any) -> Any: ...
def register_op(
    rule: str | Callable[..., Any] | None = None,
    *,
    op: Any = None,
    comm: str | Iterable[str] = (),
    indices: str | Iterable[str] = (),
) -> Any:
    """Make a function one operator of the graph, and say how it may be cut.

    `@weft.register_op("b s h+, f h+ -> b s f")` states the rule, `@weft.register_op` leaves it to be discovered, and
    `weft.register_op("b h -> b h", op=torch.ops.library.name)` states the rule of an operator of a torch library
    (`"library::name"` will do).

    Args:
        rule: a name for each dim of each operand and output; see `docs/operators.md`.
        op: an operator of a torch library.
        comm: names, marked `!` in the rule, along whose axes the function talks: it is called with `comm=`, a tuple
            of communicators, empty where none of the names is cut.
        indices: names whose global indices the function wants to know: it is called with `indices=`, a list of
            intervals `((start, stop), ...)` that the part holds, or, for several names, a tuple of such lists.

    >>> @register_op("b h -> b h")
    ... def twice(x):
    ...     return 2 * x
    >>> twice(torch.ones(1, 2)).tolist()
    [[2.0, 2.0]]
    """
    names = names_in(comm), names_in(indices)
    if any(names) and not isinstance(rule, str):
        raise TypeError("comm and indices are names of a rule: state it")
    if callable(rule) and op is None:
        return CustomOp(rule, Stated("", *names, _place_of(rule)))
    if not isinstance(rule, str | None):
        raise TypeError(f"the rule of an operator is a text, not {rule!r}")
    if op is not None:
        if any(names):
            raise TypeError("comm and indices are for functions: an operator of a torch library cannot be given them")
        for overload in _overloads(op):
            setattr(overload, STATED, Stated(rule or ""))
        return op
    return lambda function: CustomOp(function, Stated(rule or "", *names, _place_of(function)))


def stated_of(operator: Any) -> Stated | None:
    """What was stated of an operator of a torch library, or of a function."""
    if isinstance(operator, CustomOp):
        return operator.stated
    found = getattr(operator, STATED, None)
    return found if isinstance(found, Stated) else None


def tensors_in(result: Any) -> Tensor | tuple[Tensor, ...]:
    """The tensors in whatever a function returned, in order: one as itself, several as a tuple."""
    found = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    return found[0] if len(found) == 1 else found


# What generated programs use to find what is not in an importable module.


KEPT = "weft_custom_"


def kept_name(path: str) -> str:
    """The name under which `sys.modules` keeps what a file has defined, as it stands now."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        raise ImportError(f"the file {path}, in which an operator of this program is defined, is not there") from None
    digest = hashlib.sha256(str(Path(path).resolve()).encode() + b"\0" + content).hexdigest()
    return f"{KEPT}{digest[:16]}"


def keep(path: str, module: ModuleType) -> None:
    """Let `load_file` give this module for the file, if it defines operators: one process cannot define them twice."""
    ours = any(isinstance(one, CustomOp) or _is_function_class(one) for one in vars(module).values())
    if ours or defines_operators(module):
        sys.modules[kept_name(path)] = module


def defines_operators(module: ModuleType) -> bool:
    """Whether a module defines operators of torch's."""
    return any(isinstance(one, CustomOpDef | torch.library.Library) for one in vars(module).values())


def loaded(path: str) -> ModuleType | None:
    """The module of a file that this process has loaded before; also one that was imported, if it defines operators:
    torch ends an operator that is defined a second time, and a call of the first one may crash."""
    name, file = kept_name(path), Path(path).resolve()
    if name in sys.modules:
        return sys.modules[name]
    alike = {
        key: module
        for key, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").endswith(file.name)
        and Path(str(module.__file__)).resolve() == file
        and defines_operators(module)
    }
    if any(key.startswith(KEPT) for key in alike):
        raise ImportError(
            f"{path} was changed after its operators were defined, and one process cannot define them twice: start a "
            "new one"
        )
    return next(iter(alike.values()), None)


def load_file(path: str) -> ModuleType:
    """A Python file as a module, loaded once in a process."""
    name, before = kept_name(path), loaded(path)
    if before is not None:
        return before
    with as_module(name, path) as (module, run):
        run()
    # it stays
    sys.modules[name] = module
    return module


@contextmanager
def as_module(name: str, path: str) -> Iterator[tuple[ModuleType, Callable[[], None]]]:
    """A file as a module, findable under its name (dataclasses and pickle look it up) with its folder, and what runs
    it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        yield module, partial(spec.loader.exec_module, module)
    finally:
        sys.path.remove(folder)
        sys.modules.pop(name, None)


def defined_in(path: str, name: str) -> Any:
    """What a Python file defines under a name; the script that runs is not run again."""
    script = sys.modules["__main__"]
    runs = str(Path(getattr(script, "__file__", None) or "").resolve()) == path and hasattr(
        script, name.partition(".")[0]
    )
    return functools.reduce(getattr, name.split("."), script if runs else load_file(path))


def need_operator(name: str, home: str) -> None:
    """Make sure that `torch.ops` has an operator: import the module, file or library that defines it if it has not."""
    library, _, rest = name.partition(".")
    if hasattr(getattr(torch.ops, library), rest.split(".")[0]):
        return
    if home.endswith(".py"):
        load_file(home)
    elif home.endswith((".so", ".dylib", ".dll")):
        torch.ops.load_library(home)
    elif home:
        importlib.import_module(home)
    if not hasattr(getattr(torch.ops, library), rest.split(".")[0]):
        raise ImportError(f"nothing here defines torch.ops.{name}, which this program calls")


def _is_function_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def names_in(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names of a rule, as a text or one by one."""
    return tuple(given.split()) if isinstance(given, str) else tuple(given)


def _place_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    file, here = Path(code.co_filename), Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{code.co_firstlineno}"


def _overloads(op: Any) -> list[Any]:
    """The overloads that an operator, a packet of them, a `custom_op` or a name stands for."""
    if isinstance(op, str):
        library, _, name = op.replace("::", ".").partition(".")
        found: Any = getattr(torch.ops, library)
        for word in name.split("."):
            found = getattr(found, word, None)
        if found is None:
            raise TypeError(f"there is no operator {op} in any torch library: import the module that defines it first")
        op = found
    op = getattr(op, "_opoverload", op)  # what `torch.library.custom_op` makes
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(f"{op!r} is no operator of a torch library")
    return [op]
