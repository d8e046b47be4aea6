"""Caches: tensors that forward keeps for its next call, in attributes, dicts, plain objects, buffers, `lru_cache`.

Enters: a forward that ran on fake tensors, what it kept, and how it runs in other sizes and in the other mode. Leaves:
nothing, or a `CaptureError`. A cache is a pure function of sizes and constants. So what it holds can be computed here
(`Constants`): from no input, parameter or draw, and from no buffer that forward changes. And forward with a full cache
is forward with an empty one (`Reading`): it makes the same calls on the same tensors, constants compared by value, and
keeps the same; also where one forward fills the cache, and another, in other sizes or in the other mode, reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from weft.capture.example import forward_place
from weft.capture.source import place_here
from weft.capture.tracing.fingerprint import fingerprint
from weft.capture.tracing.intercept import Interception, tensors_of
from weft.capture.tracing.repeat import Call, Heard, Recorder, own
from weft.capture.tracing.surroundings import HOOK, HOOK_REMEDY, Surroundings
from weft.capture.tracing.watch import Change, Watch, blame
from weft.errors import CaptureError

UNKNOWN = object()
FORMS: Mapping[Any, int] = {
    **dict.fromkeys((torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like), 0),
    **dict.fromkeys((Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor, Tensor.new_empty), 0),
    **dict.fromkeys((Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as), 1),
}
"""Functions that take the form of an operand, not its values, and its position."""
REMEDY = (
    "compute it in every forward or in __init__, or make it a buffer of fixed shape that forward updates "
    "(register_buffer); a cache may hold what depends on sizes and constants alone, all of which must be compared "
    "before it is read"
)
MODE, SIZE = ", in the other mode (train, eval),", ", in another size,"
MADE = "a tensor there is made from an input, a parameter, a buffer that forward changes, or a draw"
Run = Callable[[], Any]


class MisfitError(Exception):
    """What is kept has another shape than what would be computed: eager torch would tell."""


class Constants:
    """What is computed from constants alone, by the tensors that stand for it in a trace.

    Args:
        buffers: the values of those that forward does not change.
    """

    def __init__(self, buffers: Mapping[int, Tensor]) -> None:
        self.values = dict(buffers)
        self._fakes: dict[int, Tensor] = {}
        self._own = set[int]()

    def value(self, leaf: Any) -> Any:
        """Of an argument; UNKNOWN if it is no constant."""
        if isinstance(leaf, Tensor) and id(leaf) in self.values:
            return self.values[id(leaf)]
        is_unknown = isinstance(leaf, Tensor) and (
            isinstance(leaf, FakeTensor) or leaf.requires_grad or leaf.device.type == "meta"
        )
        return UNKNOWN if is_unknown else leaf

    def run(self, call: Call) -> Any:
        """What a call gives; UNKNOWN if it depends on more than constants, or changes what was there before."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            given = list(map(self.value, call.leaves))
            if (at := FORMS.get(call.func, len(given))) < len(given) and given[at] is UNKNOWN:
                given[at] = torch.empty(call.leaves[at].shape, dtype=call.leaves[at].dtype)
            others = {_memory(one) for one in given if isinstance(one, Tensor)} - self._own
            if any(one is UNKNOWN for one in given) or any(_memory(one) in others for one in call.written(given)):
                return UNKNOWN
            args, kwargs = pytree.tree_unflatten(given, call.spec)
            before, result = torch.default_generator.get_state(), UNKNOWN
            with suppress(Exception):
                result = call.func(*args, **kwargs)
            is_drawn = not torch.equal(before, torch.default_generator.get_state())
            torch.default_generator.set_state(before)
            made = tensors_of(result)
            self._own |= {_memory(one) for one in made} - others
            return UNKNOWN if is_drawn or any(one.requires_grad for one in made) else result

    def replay(self, first: Recorder) -> Iterator[Step]:
        """Compute what the calls of a forward make of constants; the other calls."""
        for number, call in enumerate(first.made):
            result = first.results.get(number)
            if not (fakes := tensors_of(result)) and not call.written():
                continue
            reals = tensors_of(made := self.run(call))
            if made is not UNKNOWN and list(map(_form, fakes)) == list(map(_form, reals)):
                self.values.update(zip(map(id, fakes), reals, strict=True))
                self._fakes.update((id(one), one) for one in fakes)
                continue
            yield self.step(call, first.calls[number], result)
            memory = set(map(_memory, call.written()))
            for key in [id(one) for one in (*self._fakes.values(), *call.written()) if _memory(one) in memory]:
                self.values.pop(key, None)

    def step(self, call: Call, heard: Heard, result: Any) -> Step:
        known = {at: self.value(leaf) for at, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
        return Step(heard, {at: (one, one._version) for at, one in known.items() if one is not UNKNOWN}, result)


@dataclass(frozen=True)
class Step:
    """A call that takes more than constants: the constants among its arguments, with their versions; its result."""

    heard: Heard
    known: Mapping[int, tuple[Tensor, int]]
    result: Any


@dataclass(frozen=True)
class Filled:
    """A forward that filled the caches: its steps, the last of which is what it returned, the buffers that it did not
    change, and what it kept."""

    steps: Sequence[Step]
    buffers: Mapping[int, Tensor]
    state: Sequence[Change]


class Reading:
    """Answers the calls of a forward that finds full caches as those of one that fills them were."""

    def __init__(self, filling: Filled, told: str, strict: bool) -> None:
        self._steps, self._told, self._constants = list(filling.steps), told, Constants(filling.buffers)
        self._strict = strict

    def __call__(self, call: Call, heard: Heard, run: Run) -> Any:
        if (made := self._constants.run(call)) is not UNKNOWN:
            return made
        if self._steps and self.is_next(call, heard):
            return own(self._steps.pop(0).result)
        result = UNKNOWN
        with suppress(Exception):
            result = run()
        if result is UNKNOWN or tensors_of(result) or call.written():
            raise self.refusal(place_here())
        return result

    def is_next(self, call: Call, heard: Heard) -> bool:
        """Whether this is the next step of the forward that filled the caches."""
        step = self._steps[0]
        if step.heard[0] != heard[0] or len(step.heard) != len(heard):
            return False
        for at, leaf in enumerate(call.leaves):
            value = self._constants.value(leaf)
            if at in step.known:
                kept, version = step.known[at]
                if not self._strict and isinstance(value, Tensor) and value.shape != kept.shape:
                    raise MisfitError
                if kept._version != version or not alike(kept, value):
                    return False
            elif step.heard[1 + at] != heard[1 + at] or (isinstance(leaf, Tensor) and value is not UNKNOWN):
                return False
        return True

    def is_done(self, call: Call, heard: Heard) -> bool:
        """Whether all was done, and the same is returned."""
        return len(self._steps) == 1 and self.is_next(call, heard)

    def refusal(self, place: str) -> CaptureError:
        return CaptureError(f"{self._told} does something else here than the first", place=place, remedy=REMEDY)


@dataclass(frozen=True)
class Caches:
    """What a module, and what lies around it, keep.

    Args:
        buffers: the values of those that forward did not replace, by the tensors that stand for them.
    """

    watch: Watch
    around: Surroundings
    found: Interception
    buffers: Mapping[int, Tensor]

    def filled(self, first: Recorder, result: Any, run: Run) -> Filled:
        """What a forward did that has just run, from empty caches; refuses one that keeps more than constants."""
        buffers = self.buffers
        while True:
            constants = Constants(buffers)
            steps = list(constants.replay(first))
            # what was computed before forward changed it is no constant either
            steady = {key: one for key, one in buffers.items() if key in constants.values}
            if len(steady) == len(buffers):
                break
            buffers = steady
        state, around = self.watch.changes(), self.around.kept()
        kept = [replace(one, value=pytree.tree_map(constants.value, one.value)) for one in state]
        for one in (*kept, *(Change(f"the cache {name}", {}, "", constants.value(held)) for name, held in around)):
            if any(leaf is UNKNOWN for leaf in pytree.tree_leaves(one.value)):
                raise self._refusal(one, run, MADE)
        call = Call.of(_returned, (result,), {})
        return Filled([*steps, constants.step(call, call.heard(self.found.held), None)], buffers, kept)

    def judge(self, filled: Filled, run: Run, others: Mapping[str, Run], *, strict: bool) -> None:
        """Refuse caches that change what forward does.

        Args:
            others: forward in other forms, by how these are told.
            strict: other sizes are sure to come. Else they are no matter where eager torch would fail.
        """
        self._compare(filled, filled, run, "")
        for told, other in others.items():
            self._empty()
            recorder = Recorder()
            try:
                second = self.filled(recorder, self.found.repeat(other, recorder), other)
            except Exception:  # noqa: BLE001 - forward does not run so
                continue
            with suppress(MisfitError):
                self._compare(filled, second, other, told, strict or told == MODE)
                self._compare(second, filled, run, told, strict or told == MODE)

    def _compare(self, filling: Filled, reading: Filled, run: Run, told: str, strict: bool = True) -> None:
        """Refuse if forward, `reading` without caches, does something else with those that `filling` filled."""
        self._empty()
        for one in filling.state:
            one.space[one.name] = pytree.tree_map(lambda leaf: leaf, one.value)
        names = ", ".join(one.label for one in filling.state)
        hear = Reading(reading, f"forward keeps tensors for its next call ({names}), and that call{told}", strict)
        call = Call.of(_returned, (self.found.repeat(run, hear),), {})
        if not hear.is_done(call, call.heard(self.found.held)):
            raise hear.refusal(forward_place(self.watch.module))
        kept = {(id(one.space), one.name): one.value for one in filling.state}
        for one in self.watch.changes() if filling is reading else ():
            leaves, before = (pytree.tree_leaves(each) for each in (one.value, kept.get((id(one.space), one.name))))
            if len(leaves) != len(before) or not all(map(alike, leaves, before)):
                raise self._refusal(one, run, "it is another one after every call")

    def _empty(self) -> None:
        self.watch.restore()
        self.watch.restore_objects()
        self.around.clear_caches()

    def _refusal(self, one: Change, run: Run, why: str) -> CaptureError:
        self._empty()

        def state() -> Any:
            return fingerprint(one.space.get(one.name)), len(self.around.kept())

        return CaptureError(
            f"forward changes {one.label}: {why}, and the change would be lost",
            place=blame(run, state, self.watch.packages()) or forward_place(self.watch.module),
            remedy=HOOK_REMEDY if HOOK in one.label else REMEDY,
        )


def alike(one: Any, other: Any) -> bool:
    """The same up to rounding: a part of a longer table may be computed in another order."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (type(one) is type(other) and repr(one) == repr(other))
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if _form(one) != _form(other):
            return False
        rounding = 8 * torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0
        return torch.allclose(one, other, rounding, rounding, equal_nan=True)


def _form(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _returned(*_: Any) -> None:
    """Stands for the end of a forward."""
