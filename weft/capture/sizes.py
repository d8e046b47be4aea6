"""Symbolic sizes: torch's SymInts as `Size`s over symbols s0, s1, ... in the order of the dynamic dims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.printers import PythonPrinter

from weft.errors import CaptureError
from weft.ir.graph import Dim, Size


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
