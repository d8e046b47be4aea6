"""Symbolic sizes, and guards: what they must fulfil for the captured program to be the right one.

Enters: torch's SymInts, and the shape environment of a trace. Leaves: `Size`s over symbols s0, s1, ... in the order of
the dynamic dims; and conditions over them, each with the user's line that decided (`if x.shape[1] > 8`) or none, where
an operator asks for it (a table that is long enough). Left out is what torch decides about strides only, which no op of
the Graph depends on. A condition that cannot be kept is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from weft.capture.example import Example, forward_place
from weft.capture.source import is_users, place_of
from weft.capture.tracing.refuse import FIXED_REMEDY
from weft.errors import CaptureError
from weft.ir.graph import Dim, Graph, Size
from weft.runtime.program.sizes import evaluate

STRIDES = ("_prims_common", "_refs")
"""Where torch thinks about strides and memory formats."""
SHAPES = ("infer_size",)
"""What it thinks there about shapes."""


@dataclass
class Sizes:
    """Turns torch's symbols into ours."""

    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)

    def dim(self, size: int | torch.SymInt) -> Dim:
        """A size of a shape, or a size in arguments."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            self.symbols.setdefault(symbol, f"s{len(self.symbols)}")
        renamed = expression.subs({old: sympy.Symbol(new, integer=True) for old, new in self.symbols.items()})
        return Size(PythonPrinter().doprint(renamed), int(size.node.hint))

    def recorded(self, arg: Any, context: Any) -> Any:
        """An argument as it stands in an Op."""
        if isinstance(arg, tuple | list):
            return tuple(self.recorded(item, context) for item in arg)
        if isinstance(arg, torch.SymInt):
            return self.dim(arg)
        if isinstance(arg, torch.SymFloat | torch.SymBool):
            if arg.node.expr.is_number:
                return arg.node.pytype(arg.node.expr)
            raise CaptureError(
                f"a {arg.node.pytype.__name__} computed from a dynamic size: {arg.node.expr}",
                place=context.place,
                remedy="leave that dim out of `dynamic`, or compute it with tensors",
            )
        return arg


def is_data_dependent(value: Any) -> bool:
    """Whether a size or a tensor's shape depends on values in tensors."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return bool(free_unbacked_symbols(value))
    if isinstance(value, torch.Tensor):
        return any(is_data_dependent(dim) for dim in value.shape)
    if isinstance(value, tuple | list):
        return any(is_data_dependent(item) for item in value)
    return False


def guards_of(mode: FakeTensorMode, sizes: Sizes, graph: Graph) -> tuple[tuple[str, str], ...]:
    """Conditions and places."""
    env: Any = mode.shape_env
    if env is None:
        return ()
    renamed = {old: sympy.Symbol(new, integer=True) for old, new in sizes.symbols.items() if new in graph.symbols}
    known = {symbol: graph.tensors[tensor].sizes[dim] for symbol, (tensor, dim) in graph.symbols.items()}
    found: dict[str, str] = {}
    for expression, place in (*_decisions(env), *_ranges(env, renamed)):
        plain = env.simplify(expression)
        if plain == sympy.true or not plain.free_symbols <= set(renamed):
            continue  # the size of a stride is no size of a dim
        text = PythonPrinter().doprint(plain.subs(renamed))
        _refuse_unknown(text, known, place)
        found[text] = found.get(text) or place
    return tuple(found.items())


def refuse_fixed(
    module: nn.Module, example: Example, tensors: Sequence[torch.Tensor], shapes: Sequence[Mapping[int, Any] | None]
) -> None:
    """Refuse a marked dim whose size forward has fixed, with the line that did."""
    for i, dims in enumerate(shapes):
        for dim in dims or ():
            size = tensors[i].shape[dim]
            if isinstance(size, torch.SymInt) and size.node.expr.is_number:
                raise CaptureError(
                    f"dim {dim} of {example.wheres[i]} is marked dynamic and cannot vary: forward fixes it to {size}",
                    place=_fixing(size.node.shape_env, size.node._expr) or forward_place(module),
                    remedy=FIXED_REMEDY,
                )


def _fixing(env: Any, symbol: Any) -> str:
    """The user's line that made a symbol a number."""
    places = [place for expression, place in _decisions(env) if isinstance(expression, sympy.Eq)]
    about = [
        place
        for expression, place in _decisions(env)
        if isinstance(expression, sympy.Eq) and symbol in expression.free_symbols
    ]
    return next((place for place in (*about, *places) if place), "")


def _ranges(env: Any, renamed: dict[sympy.Symbol, sympy.Symbol]) -> Iterator[tuple[Any, str]]:
    for symbol in renamed:
        span = env.var_to_range.get(symbol)
        if span is not None and span.upper != int_oo and span.upper < 2**31:
            yield sympy.Le(symbol, span.upper), ""
        if span is not None and span.lower > 2:
            yield sympy.Ge(symbol, span.lower), ""


def _decisions(env: Any) -> Iterator[tuple[Any, str]]:
    for guard in env.guards:
        where = getattr(guard.sloc, "framework_loc", None)
        file, name = getattr(where, "filename", str(where)), getattr(where, "name", "")
        if any(f"/{part}/" in file or f"{part}/" in file for part in STRIDES) and name not in SHAPES:
            continue
        yield guard.expr, place_of(where) if isinstance(where, FrameSummary) and is_users(where.filename) else ""


def _refuse_unknown(text: str, known: dict[str, int], place: str) -> None:
    try:
        holds = bool(evaluate(text, known))
    except (ValueError, SyntaxError):
        raise CaptureError(
            f"forward decides by a condition on dynamic sizes that cannot be kept: {text}",
            place=place,
            remedy="leave that dim unmarked, or remove the dependence on its size",
        ) from None
    assert holds, f"{text} does not hold for the example ({known}), and yet it was captured so"
