"""Float64 everywhere: a dispatch mode that turns every lower float dtype into float64.

In: operator calls of any module, forward and backward. Out: the same calls with float32, bfloat16 and the like replaced
by float64 (and complex64 by complex128) in dtype arguments, operands and results. Promised: no arithmetic happens in a
lower float dtype once its operands are float64, so `logits.float()` does not round. Values that were rounded before
(a literal held in float32) keep their rounded value, on both sides alike.

Modes belong to a thread: every rank enters its own. On the CPU backward runs in the thread that calls it, under the
same modes. Autocast has no effect under it: autocast leaves float64 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.runtime.operators.experts import grouped_product

NO_FLOAT64: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: lambda a, b, offs=None, bias=None, out_dtype=None: grouped_product(a, b, offs),
}
"""Operators that take lower floats only, and what computes the same in float64."""


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for any float dtype, complex128 for any complex one, any other unchanged.

    >>> widen_dtype(torch.bfloat16), widen_dtype(torch.int64)
    (torch.float64, torch.int64)
    """
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def widen(value: Any) -> Any:
    """A dtype or tensor without lower floats; anything else unchanged."""
    if isinstance(value, torch.dtype):
        return widen_dtype(value)
    if isinstance(value, torch.Tensor) and is_lower(value):
        return value.to(widen_dtype(value.dtype))
    return value


def is_lower(value: Any) -> bool:
    """True for a tensor of a float dtype below float64."""
    return isinstance(value, torch.Tensor) and widen_dtype(value.dtype) != value.dtype


@dataclass(frozen=True)
class _Form:
    """What the mode needs to know of an operator: operands that it writes to, by position and by name."""

    function: Callable[..., Any]
    written: frozenset[int | str]
    mutable: bool
    takes_dtype: bool


class Float64Mode(TorchDispatchMode):
    """Under it, every lower float dtype is float64."""

    def __init__(self) -> None:
        super().__init__()
        # schemas are slow to read, and a run calls few operators many times
        self._forms: dict[torch._ops.OpOverload, _Form] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under it, and being kept from that would cost more than the mode itself
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        form = self._forms.get(func)
        if form is None:
            form = self._forms[func] = _form(func)
        # an operand that the operator writes to must stay the very tensor it is
        wide_args = [arg if at in form.written else _widen_operand(arg) for at, arg in enumerate(args)]
        wide_kwargs = {
            name: arg if name in form.written else _widen_operand(arg) for name, arg in (kwargs or {}).items()
        }
        result = form.function(*wide_args, **wide_kwargs)
        if form.mutable or not _holds_lower(result):
            return result
        if form.takes_dtype and wide_kwargs.get("dtype") is None and not any(_is_tensor(arg) for arg in wide_args):
            # A factory left the dtype to the default: `full([2], 0.1)` must not round its value first.
            return func(*wide_args, **{**wide_kwargs, "dtype": torch.float64})
        return tree_map(widen, result)


def _form(func: torch._ops.OpOverload) -> _Form:
    arguments = func._schema.arguments
    written = [(at, one.name) for at, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
    return _Form(
        function=NO_FLOAT64.get(func, func),
        written=frozenset(key for pair in written for key in pair),
        mutable=func._schema.is_mutable,
        takes_dtype=any(one.name == "dtype" for one in arguments),
    )


def _widen_operand(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg if arg.dtype is torch.float64 else widen(arg)
    if isinstance(arg, list | tuple):
        return [widen(item) for item in arg]
    return widen(arg)


def _holds_lower(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return result.dtype is not torch.float64 and is_lower(result)
    return any(map(is_lower, tree_leaves(result)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class LowerMode(TorchDispatchMode):
    """Notices (`met`) whether something is computed in a lower float dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, dict(kwargs or {}), result))
        self.met = self.met or any(
            is_lower(leaf) or (isinstance(leaf, torch.dtype) and widen_dtype(leaf) != leaf) for leaf in leaves
        )
        return result
