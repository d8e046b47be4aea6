"""Counted initialisation: an element's value is a pure function of the seed, the parameter's name and its index.

In: a Record (`recording.py`) with its seed. Out: the values of any part of its tensors, CHUNK elements at a time: what
a rank does not hold is never made, whatever comes before it in the constructor. Promised: the same values, to the bit,
for every cut; the distributions, constants and copies of the constructor, not the numbers of torch's generator. Every
draw has a stream of its own, so seeds that the constructor sets do nothing. What depends on random numbers and is not
made element by element is refused (`NotElementwise`) before anything is made; what depends on none is computed whole,
as the constructor does it.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.transfer import Index
from weft.runtime.random import Stream
from weft.runtime.start.elements import CHUNK, PartOffsets, contiguous_strides, offsets_at, positions
from weft.runtime.start.init_distributions import CONSTANTS, DRAWS, Numbers, given_to, is_of_a_kind, written_at
from weft.runtime.start.record import At, Entry, Record
from weft.runtime.start.replaying import default_dtype_kept, replay


class NotElementwise(Exception):  # noqa: N818 - says what is the matter
    """A tensor whose elements depend on each other and on random numbers.

    Args:
        name: of the tensor.
        function: the operator that mixes them.
        place: the line that calls it.
    """

    def __init__(self, name: str, function: str, place: str) -> None:
        super().__init__(f"{name} is made by {function}")
        self.name, self.function, self.place = name, function, place


class Counted:
    """The values of a recorded module, by counting.

    Not for several threads at once."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._writers: dict[int, list[int]] = {}
        for number, entry in enumerate(record.entries):
            for storage in entry.sets:
                self._writers.setdefault(storage, []).append(number)
        self._random = _random_entries(record)
        self._streams = _streams(record)
        self._computed: dict[tuple[int, int], Tensor] = {}

    def check(self, names: Collection[str]) -> None:
        """Refuse what cannot be made.

        Raises:
            NotElementwise: with the tensor's name."""
        seen: set[tuple[int, torch.dtype]] = set()
        for name in names:
            tensor = self._record.tensors[name]
            waiting = [(tensor, len(self._record.entries))] if isinstance(tensor, At) else []
            while waiting:
                waiting += self._sources(name, *waiting.pop(), seen)

    def _sources(
        self, name: str, like: At, before: int, seen: set[tuple[int, torch.dtype]]
    ) -> Iterator[tuple[At, int]]:
        """What the content of a storage before an entry is made from: tensors, each before an entry."""
        number = self._writer(like.storage, before)
        if number is None or (number, like.dtype) in seen:
            return
        seen.add((number, like.dtype))
        entry = self._record.entries[number]
        if _counted_at(entry, like) is None:
            if self._random[number]:
                raise NotElementwise(name, entry.name.removeprefix("aten::"), entry.place)
            return
        if like.storage not in entry.covers:
            yield like, number
        for value in (*entry.args, *entry.kwargs.values()):
            if isinstance(value, At) and value.storage not in entry.covers:
                yield value, number

    def _writer(self, storage: int, before: int) -> int | None:
        """The last entry before that one that writes to a storage."""
        writers = self._writers.get(storage, [])
        place = bisect.bisect_left(writers, before)
        return writers[place - 1] if place else None

    @torch.no_grad()
    def fill(self, name: str, index: Index, into: Tensor) -> None:
        """Write the part of a tensor at `index`; `check` has passed it."""
        tensor = self._record.tensors[name]
        assert isinstance(tensor, At), f"{name} has its values"
        part = PartOffsets(tensor, index)
        flat = into.view(-1) if into.is_contiguous() else torch.empty(part.num_elements, dtype=into.dtype)
        with default_dtype_kept():
            for start in range(0, part.num_elements, CHUNK):
                piece = flat[start : start + CHUNK]
                piece.copy_(self._values(tensor, part.chunk(start), len(self._record.entries))[: piece.numel()])
        if not into.is_contiguous():
            into.copy_(flat.view(part.shape))
        self._computed.clear()

    def _values(self, like: At, offsets: Tensor, before: int) -> Tensor:
        """Elements of a storage as they are before an entry, in the dtype of `like`; zeros if nothing sets them."""
        found = torch.zeros(CHUNK, dtype=like.dtype)
        wanted = torch.ones(CHUNK, dtype=torch.bool)
        number = self._writer(like.storage, before)
        while number is not None:
            entry = self._record.entries[number]
            target = _counted_at(entry, like)
            if target is None:
                return torch.where(wanted, self._as_computed(like, number)[offsets], found)
            position, inside = positions(target, offsets)
            if bool((inside & wanted).any()):
                found = torch.where(inside & wanted, self._made(number, target, position, offsets), found)
                wanted &= ~inside
                if not bool(wanted.any()):
                    break
            number = self._writer(like.storage, number)
        return found

    def _made(self, number: int, target: At, position: Tensor, offsets: Tensor) -> Tensor:
        """What an entry makes at some positions of its result."""
        entry = self._record.entries[number]
        if entry.draws:
            return DRAWS[entry.name](Numbers(self._streams[number], position), given_to(entry)).to(target.dtype)
        if entry.name in CONSTANTS:
            return torch.full((CHUNK,), CONSTANTS[entry.name](given_to(entry)), dtype=target.dtype)
        torch.set_default_dtype(entry.default_dtype)
        args = [self._operand(one, number, target, position, offsets, own=i == 0) for i, one in enumerate(entry.args)]
        kwargs = {
            key: self._operand(one, number, target, position, offsets)
            for key, one in entry.kwargs.items()
            if key != "memory_format"
        }
        found: Tensor = entry.function(*args, **kwargs)
        assert found.shape == (CHUNK,), f"{entry.function} works place by place"
        return found

    def _operand(
        self, value: Any, number: int, target: At, position: Tensor, offsets: Tensor, *, own: bool = False
    ) -> Any:
        """The elements of an operand at these positions of the result; others as they are."""
        if isinstance(value, At):
            if own and value == target:
                if target.storage in self._record.entries[number].covers:
                    return torch.empty(CHUNK, dtype=target.dtype)
                return self._values(value, offsets, number)
            if not value.size:
                return self._values(value, torch.full((CHUNK,), value.offset), number)[0]
            return self._values(value, offsets_at(value, position, target.size), number)
        if isinstance(value, Tensor) and value.dim():
            plain = At(0, 0, tuple(value.shape), contiguous_strides(value.shape), value.dtype)
            return value.reshape(-1)[offsets_at(plain, position, target.size)]
        return value

    def _as_computed(self, like: At, number: int) -> Tensor:
        """A whole storage after an entry, computed as the constructor does: it depends on no random number."""
        key = (like.storage, number)
        if key not in self._computed:
            assert not self._random[number], "checked"
            whole = At(like.storage, 0, (self._record.sizes[like.storage],), (1,), torch.uint8)
            before = replace(self._record, entries=self._record.entries[: number + 1], tensors={"": whole})
            replay(before, [""], lambda name, tensor: self._computed.update({key: tensor.clone()}))
        return self._computed[key].view(like.dtype)


def _counted_at(entry: Entry, like: At) -> At | None:
    """The tensor that an entry makes in a storage, element by element and in that dtype; None if it does not."""
    target = written_at(entry, like.storage)
    return target if target is not None and target.dtype == like.dtype and is_of_a_kind(entry) else None


def _random_entries(record: Record) -> list[bool]:
    """For each entry: does what it writes depend on random numbers?"""
    tainted: set[int] = set()
    found = []
    for entry in record.entries:
        random = entry.draws or not tainted.isdisjoint(entry.touches - entry.covers)
        tainted = tainted | entry.sets if random else tainted - entry.covers
        found.append(random)
    return found


def _streams(record: Record) -> dict[int, Stream]:
    """A stream for each draw: by the name of what it fills, and how many draws filled it before."""
    names: dict[int, str] = {}
    for name, tensor in record.tensors.items():
        if isinstance(tensor, At):
            names.setdefault(tensor.storage, name)
    found, seen = {}, dict[str, int]()
    for number, entry in enumerate(record.entries):
        if entry.draws:
            name = next((names[storage] for storage in sorted(entry.sets) if storage in names), "")
            seen[name] = seen.get(name, 0) + 1
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            found[number] = Stream(record.seed, key, seen[name])
    return found
