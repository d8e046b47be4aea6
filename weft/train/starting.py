"""Starts: what a module begins from.

In: a module, or a function that makes it, and how its values are to be made. Out: a Start, to be captured, and Values,
of which ranks take their parts:

- a module with values: its own;
- a function: recorded without its values; then "exact" replays it, one whole tensor at a time, and "counter" counts
  values of the same kind, each rank its own elements;
- a module on the meta device: from weights alone; or a function of the module that gives it values, which is recorded
  as if it were called on memory of the CPU.

Promised: nothing of the user's module is changed, and a module without values, or of which some stay unset, is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.runtime.start.initialise import Start, begin, begin_hollow, module_tensors
from weft.runtime.start.recording import Unrecordable
from weft.train.weights import PASS_A_FUNCTION, Replayed, Values, Weights, listed

Model = nn.Module | Callable[[], nn.Module]
Init = Literal["exact", "counter"] | Callable[[Any], object]
"""How values are made: exactly as on one device, by counting, or by a function of a module on the meta device."""

INITS = ("exact", "counter")


def started(model: Model, seed: int, init: Init = "exact", weights: Weights | None = None) -> Start:
    """The module, without its values where that can be."""
    if init not in INITS and not callable(init):
        raise RunError(f"init is {init!r}", remedy='"exact", "counter", or a function that gives a meta module values')
    if not isinstance(model, nn.Module) and not isinstance(init, str):
        raise RunError(
            "init is a function, and so is the model, which gives itself its values",
            remedy='let the model\'s function call it; or build the module under torch.device("meta") and pass it',
        )
    if isinstance(model, nn.Module):
        start = Start(model) if isinstance(init, str) else _given_values(model, seed, init)
    else:
        start = begin(model, seed)
    if check_start(start, init, has_weights=weights is not None) and not isinstance(model, nn.Module):
        warnings.warn(
            f"the module is built whole on every rank, not one parameter at a time: {start.reason}", stacklevel=3
        )
    return start


def check_start(start: Start, init: Init = "exact", *, has_weights: bool = False) -> bool:
    """Refuse a module that has no values, or has them where they were to be counted; True if it has all of them."""
    if start.record is not None:
        return False
    hollow, place = _on_meta(start.module), type(start.module).__name__
    if hollow and not has_weights:
        raise RunError(
            f"{listed(hollow)}: on the meta device, which has shapes and no values",
            place=place,
            remedy=f"weights=FILES; or init=FUNCTION, called with the module; or {PASS_A_FUNCTION}",
        )
    if init == "counter" and not hollow:
        raise RunError(
            f"nothing is left to be counted: {start.reason or 'the module has its values'}",
            place=place,
            remedy=f'{PASS_A_FUNCTION}; or init="exact"',
        )
    return not hollow


def values_of(start: Start, init: Init = "exact") -> Values:
    """What ranks take their parts of."""
    return start.module if start.record is None else Replayed(start.record, counts=init == "counter")


def _given_values(module: nn.Module, seed: int, init: Callable[[Any], object]) -> Start:
    """A module on the meta device, given values by a function that is recorded."""
    place = type(module).__name__
    if not _on_meta(module):
        raise RunError(
            "init is a function, and the module has its values",
            place=place,
            remedy='call it on the module before parallelize, or build the module under torch.device("meta")',
        )

    made = copy.deepcopy(module)

    def make() -> nn.Module:
        _give_memory(made)
        init(made)
        return made

    try:
        start = begin_hollow(make, seed)
    except Unrecordable as error:
        raise RunError(f"init cannot be recorded: {error}", place=place, remedy=PASS_A_FUNCTION) from None
    assert start.record is not None, "hollow"
    unset = start.record.unset(start.record.tensors)
    if unset:
        raise RunError(
            f"init leaves {listed(unset)} without values", place=place, remedy=f"set them too; or {PASS_A_FUNCTION}"
        )
    return start


def _give_memory(module: nn.Module) -> None:
    """Give tensors of the meta device memory of the CPU, of no content; ties stay."""
    seen: dict[int, Tensor] = {}

    def there(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            found: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, requires_grad=tensor.requires_grad)
            found.__dict__.update(tensor.__dict__)
            seen[id(tensor)] = found
        return seen[id(tensor)]

    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({name: there(one) for name, one in table.items() if one is not None and one.is_meta})


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, tensor in module_tensors(module).items() if tensor.is_meta]
