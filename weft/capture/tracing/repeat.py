"""A second forward beside the trace: what it does otherwise than the first would be frozen into the program.

Enters: a forward that is traced, and the torch calls that it makes. Leaves: nothing, or a `CaptureError` that
names what changed or the line that differs: clocks, counters, anything drawn outside torch. The second forward runs the
user's code alone: torch calls are compared, and answered with what they returned the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from weft.capture.example import forward_place
from weft.capture.source import place_here
from weft.capture.tracing.surroundings import HOOK, HOOK_REMEDY, Surroundings
from weft.capture.tracing.watch import Watch, blame
from weft.errors import CaptureError

Heard = tuple[Any, ...]
"""A torch call: the function, and what it was given that is no tensor."""
TRANSFORMED = "transformed"
WRITES = frozenset(
    ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__")
)
"""Functions that change their first argument and whose names do not end in one underscore."""
FLAGS = frozenset(
    {getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")}
    | {torch.Tensor.requires_grad_, torch.Tensor.share_memory_}
)
"""Functions that by their names change a tensor, and do not change its values."""
REMEDY = "pass it in as an input, or make it a buffer that forward updates (register_buffer)"


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that a call is given. The same one is equal to itself, though its shape was changed in place since. Of
    two parameters or buffers each is another one; of other tensors those of one shape may stand for the same."""

    number: int
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    is_held: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operand):
            return False
        if self.number == other.number or (self.is_held and other.is_held):
            return self.number == other.number
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Call:
    """A torch call: the function, and its arguments, flat. Lists that it was given may change later."""

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: tuple[str, ...]

    @staticmethod
    def of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return Call(func, tuple(leaves), spec, tuple(kwargs))

    def written(self, given: Sequence[Any] = ()) -> list[torch.Tensor]:
        """The tensors that it changes: the first that it is given, or (at most) all where it is told to write into one.

        Args:
            given: values in the place of its arguments.
        """
        name = getattr(self.func, "__name__", "")
        is_inplace = name.endswith("_") and (not name.endswith("__") or name in WRITES)
        if "inplace" in self.names:
            # torch's own functions pass it on by name
            is_inplace = bool(pytree.tree_unflatten(self.leaves, self.spec)[1]["inplace"])
        tensors = [one for one in given or self.leaves if isinstance(one, torch.Tensor)]
        return tensors if "out" in self.names else tensors[:is_inplace]

    def changed(self) -> list[torch.Tensor]:
        """The tensors whose values it changes."""
        if "out" in self.names:
            out = pytree.tree_unflatten(self.leaves, self.spec)[1]["out"]
            return [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        return [] if self.func in FLAGS else self.written()

    def heard(self, held: Container[int] = ()) -> Heard:
        """The call in a form that compares. Sizes that depend on values have new names each time.

        Args:
            held: the identities of the parameters and buffers of the module.
        """
        # export's own modes would look at each question about a tensor
        with torch._C.DisableTorchFunction():
            return self.func, *(plain(leaf, held) for leaf in self.leaves)


def plain(leaf: Any, held: Container[int] = ()) -> Any:
    """An argument in a form that compares."""
    if isinstance(leaf, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        return TRANSFORMED
    if isinstance(leaf, torch.Tensor):
        sizes = tuple(size if type(size) is int else None for size in leaf.shape)
        return Operand(id(leaf), sizes, leaf.dtype, id(leaf) in held)
    return repr(leaf) if isinstance(leaf, int | float | complex | str | torch.dtype) else type(leaf)


Hear = Callable[[Call, Heard, Callable[[], Any]], Any]
"""Answers a call, which it may run."""


class Recorder:
    """Runs the calls of the first forward, and keeps what they returned."""

    def __init__(self) -> None:
        self.calls: list[Heard] = []
        self.made: list[Call] = []
        self.results: dict[int, Any] = {}

    def __call__(self, call: Call, heard: Heard, run: Callable[[], Any]) -> Any:
        number = len(self.calls)
        self.calls.append(heard)
        self.made.append(call)
        result = run()
        if any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(result)) or Operand in map(type, heard):
            self.results[number] = own(result)
        return result

    @property
    def given(self) -> set[int]:
        """The identities of the tensors that calls were given."""
        return {id(leaf) for call in self.made for leaf in call.leaves if isinstance(leaf, torch.Tensor)}

    @property
    def transformed(self) -> bool:
        """True if forward calls a transform of torch.func, which is refused later, and cannot run again in a trace."""
        return any(TRANSFORMED in call for call in self.calls)


class Comparer:
    """Answers the calls of a second forward as those of the first were; refuses the first one that differs."""

    def __init__(self, first: Recorder) -> None:
        self._first, self._number = first, -1

    def __call__(self, call: Call, heard: Heard, run: Callable[[], Any]) -> Any:
        self._number += 1
        if self._number >= len(self._first.calls) or heard != self._first.calls[self._number]:
            raise CaptureError(
                "a second forward does something else here than the first: what changes between them (a clock, a "
                "counter, a draw outside torch) would be frozen into the program",
                place=place_here(),
                remedy=REMEDY,
            )
        # what has no tensor acts on torch itself (a grad mode): it runs again, and so does a call that failed
        return own(self._first.results[self._number]) if self._number in self._first.results else run()


def own(result: Any) -> Any:
    """A list that the caller may change."""
    return list(result) if type(result) is list else result


@contextmanager
def unchanged(surroundings: Surroundings, watch: Watch, again: Callable[[], Any]) -> Iterator[None]:
    """While this is entered, nothing around the module may change. `again` runs forward, to find the line."""

    def rerun() -> None:
        # it may differ once more
        with suppress(CaptureError):
            again()

    try:
        yield
    finally:
        # what counts also makes a second forward differ: that it counts says more
        if (found := surroundings.changed()) is not None:
            name, state = found
            raise CaptureError(
                f"forward changes {name}, outside the module: the change would be lost",
                place=blame(rerun, state, watch.packages()) or forward_place(watch.module),
                remedy=HOOK_REMEDY if name.startswith(HOOK) else REMEDY,
            )
