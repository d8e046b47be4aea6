"""Replaying: the values of a recorded module, one whole tensor at a time.

In: a Record and, by name, what is wanted of it. Out: each wanted tensor, whole, as soon as nothing will change it any
more; the receiver keeps what it wants and the rest is gone. The operators run in the order of the constructor with
torch's generator, so the values are those of `torch.manual_seed(seed)` and the constructor, to the bit. Promised: a
storage has memory only from the operator that begins its values to the last one that needs them; what is overwritten
unread is drawn, for the generator's sake, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.runtime.start.record import At, Entry, Record
from weft.runtime.start.recording import Recorded

Receive = Callable[[str, Tensor], None]


@torch.no_grad()
def replay(record: Record, wanted: Collection[str], receive: Receive) -> None:
    """Hand over each wanted tensor when it is complete. The generator is as before afterwards.

    Not for several threads at once: torch's generator is one."""
    finals: dict[int, dict[str, At]] = {}
    for name in wanted:
        tensor = record.tensors[name]
        if isinstance(tensor, At):
            finals.setdefault(tensor.storage, {})[name] = tensor
        else:
            receive(name, tensor)
    needed = needed_entries(record, frozenset(finals))
    last = {storage: number for number in needed for storage in record.entries[number].touches}
    ending: dict[int, set[int]] = {}
    for storage, number in last.items():
        ending.setdefault(number, set()).add(storage)
    with torch.random.fork_rng(devices=[]), default_dtype_kept():
        torch.manual_seed(record.seed)
        run = _Run(record, finals, receive, {entry.state for entry in record.entries if isinstance(entry.state, int)})
        run.note()
        for number, dropped in needed.items():
            run.step(record.entries[number], dropped, ending.get(number, set()))
    for storage in [storage for storage in finals if storage not in last]:
        run.complete(storage)


@contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Entries are run in the default dtype of their line; afterwards it is as before."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def needed_entries(record: Record, finals: frozenset[int]) -> dict[int, frozenset[int]]:
    """The entries to be run, in order, each with those of its storages whose values nobody needs after it.

    Backwards: an entry is needed if somebody reads what it writes, or if it draws and a needed one draws later."""
    live, draws = set(finals), False
    found: dict[int, frozenset[int]] = {}
    for number in range(len(record.entries) - 1, -1, -1):
        entry = record.entries[number]
        results = entry.sets
        if live.isdisjoint(results) and not (entry.draws and draws):
            continue
        found[number] = entry.touches - live
        draws = draws or entry.draws
        made = {one.storage for one in entry.makes if one is not None}
        live -= made | entry.covers
        live |= entry.touches - made - entry.covers
    return dict(reversed(found.items()))


@dataclass
class _Run:
    """A replay that is going on."""

    record: Record
    finals: Mapping[int, Mapping[str, At]]
    receive: Receive
    noted: set[int]
    """Numbers of draws after which the generator's state will be wanted again."""
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    draws: int = 0
    states: dict[int, Tensor] = field(default_factory=dict)

    def step(self, entry: Entry, dropped: frozenset[int], ending: set[int]) -> None:
        """Run an entry; drop what is not needed after it, hand over what it completes."""
        if entry.draws:
            self._seed(entry)
        torch.set_default_dtype(entry.default_dtype)
        args, kwargs = tree_map(
            lambda one: self.tensor(one) if isinstance(one, At) else one, (entry.args, entry.kwargs)
        )
        results = entry.function(*args, **kwargs)
        if entry.draws:
            self.draws += 1
            self.note()
        listed = results if isinstance(results, tuple | list) else [results]
        for made, result in zip(entry.makes, listed, strict=False):
            if made is not None:
                self.storages[made.storage] = result.untyped_storage()
        del args, kwargs, results, listed
        for storage in entry.touches:
            if storage in ending and storage in self.finals:
                self.complete(storage)
            elif storage in dropped:
                self.storages.pop(storage, None)

    def _seed(self, entry: Entry) -> None:
        if isinstance(entry.state, Tensor):
            torch.set_rng_state(entry.state)
        elif entry.state is not None:
            torch.set_rng_state(self.states[entry.state])

    def note(self) -> None:
        """Keep the generator's state if it will be wanted."""
        if self.draws in self.noted:
            self.states[self.draws] = torch.get_rng_state()

    def tensor(self, at: At) -> Tensor:
        """The tensor at a place; its storage gets memory now if it has none."""
        if at.storage not in self.storages:
            self.storages[at.storage] = torch.UntypedStorage(self.record.sizes[at.storage])
        empty = torch.empty(0, dtype=at.dtype)
        return empty.set_(self.storages[at.storage], at.offset, at.size, at.stride)

    def complete(self, storage: int) -> None:
        """Hand over what lies in a storage, and forget it."""
        for name, at in self.finals[storage].items():
            self.receive(name, self.tensor(at))
        self.storages.pop(storage, None)


def fill_strays(recorded: Recorded) -> None:
    """Give what is no parameter its values, in place: the module can be captured then."""
    record = recorded.record
    wanted = {str(number): At(number, 0, (record.sizes[number],), (1,), torch.uint8) for number in recorded.strays}

    def receive(name: str, values: Tensor) -> None:
        torch.empty(0, dtype=torch.uint8).set_(recorded.strays[int(name)]).copy_(values)

    replay(replace(record, tensors=wanted), wanted, receive)  # type: ignore[arg-type]
