"""A second forward beside the trace: what it does otherwise than the first would be frozen into the program.

Enters: a forward that was just traced, and the torch calls that it made. Leaves: nothing, or a `CaptureError` that
names what changed or the line that differs: clocks, counters, anything drawn outside torch. The second forward runs on
the same fake tensors and is not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from weft.capture.source import place_here
from weft.capture.tracing.surroundings import Surroundings
from weft.errors import CaptureError

Heard = tuple[Any, ...]
"""A torch call: the function, and what it was given that is no tensor."""
TRANSFORMED = "transformed"
REMEDY = "pass it in as an input, or make it a buffer that forward updates (register_buffer)"


def heard(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Heard:
    """A call, in a form that compares. Sizes that depend on values have new names each time."""
    leaves, _ = pytree.tree_flatten((args, kwargs or {}))
    return func, *(_plain(leaf) for leaf in leaves)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        return TRANSFORMED
    if isinstance(leaf, torch.Tensor):
        return tuple(size if type(size) is int else None for size in leaf.shape), leaf.dtype
    return repr(leaf) if isinstance(leaf, int | float | complex | str) else type(leaf)


def is_transformed(first: list[Heard]) -> bool:
    """True if forward calls a transform of torch.func, which is refused later, and cannot run again in a trace."""
    return any(TRANSFORMED in call for call in first)


class Comparing:
    """Refuses the first call that differs from what the first forward did."""

    def __init__(self, first: list[Heard]) -> None:
        self._rest: Iterator[Heard] = iter(first)

    def __call__(self, call: Heard) -> None:
        if call != next(self._rest, None):
            raise CaptureError(
                "a second forward does something else here than the first: what changes between them (a clock, a "
                "counter, a draw outside torch) would be frozen into the program",
                place=place_here(),
                remedy=REMEDY,
            )


@contextmanager
def unchanged(surroundings: Surroundings, place: str) -> Iterator[None]:
    """While this is entered, nothing around the module may change."""
    try:
        yield
    finally:
        # what counts also makes a second forward differ: that it counts says more
        if (name := surroundings.changed()) is not None:
            raise CaptureError(
                f"forward changes {name}, outside the module: the change would be lost", place=place, remedy=REMEDY
            )
