"""RecordedTransport: tells what a rank sends and waits for, while nothing is sent.

In: a rank that runs on fake tensors, and a list of events. Out: an Issue for each collective, with a Wait where its
result is first needed, a Post and a Take for each message. What a transport itself computes to carry a call (copies
into buckets, sums) is part of the call's time, and no kernel of the rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor

from weft.cost.links import BUCKET
from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.fake_transport import FakeTransport
from weft.runtime.links.transport import Expected, Expects, Group, Handle, Sends
from weft.runtime.links.wire import num_bytes
from weft.simulate.trace import Event, Issue, Place, Post, Take, Wait

T = TypeVar("T")


class _Awaited(Generic[T]):
    """A call of which it is told when its result is first needed."""

    def __init__(self, handle: Handle[T], tell: Callable[[], None]) -> None:
        self._handle, self._tell = handle, tell
        self._is_told = False

    def wait(self) -> T:
        if not self._is_told:
            self._is_told = True
            self._tell()
        return self._handle.wait()


class RecordedTransport(FakeTransport):
    """One rank, and nobody there.

    Args:
        events: where to. place: where the rank is.
    """

    def __init__(
        self, rank: int, num_ranks: int, events: list[Event], place: Callable[[], Place], *, by_block: bool
    ) -> None:
        super().__init__(rank, num_ranks, by_block=by_block)
        self.events, self._place, self._num_calls, self._depth = events, place, 0, 0
        self._groups: dict[Group, Group] = {}

    @property
    def is_carrying(self) -> bool:
        """True inside of a call, of which all is told."""
        return self._depth > 0

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _issued(self, kind: str, group: Group, size: int) -> int | None:
        """The number of a call; None if it is part of another one, or nothing travels."""
        if self._depth or len(group) < 2:
            return None
        self._num_calls += 1
        members = self._groups.setdefault(group, group)
        self.events.append(Issue(self._num_calls, kind, members, size, self._place()))
        return self._num_calls

    def _now(self, kind: str, group: Group, size: int, call: Callable[[], T]) -> T:
        """A call whose result is needed at once."""
        number = self._issued(kind, group, size)
        with self._carrying():
            found = call()
        if number is not None:
            self.events.append(Wait(number))
        return found

    def _later(self, kind: str, group: Group, size: int, call: Callable[[], Handle[T]]) -> Handle[T]:
        number = self._issued(kind, group, size)
        with self._carrying():
            found = call()
        return found if number is None else _Awaited(found, lambda: self.events.append(Wait(number)))

    # -- collectives

    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        return self._now(
            "all_reduce", group, tensor.nbytes, lambda: super(RecordedTransport, self).all_reduce(tensor, group, op)
        )

    def all_gather(self, tensor: Tensor, group: Group, *, copies: bool = True, **how: Any) -> list[Tensor]:
        whole = tensor.nbytes * len(group)
        gather = super().all_gather
        return self._now("all_gather", group, whole, lambda: gather(tensor, group, copies=copies, **how))

    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        exchange = super().all_to_all
        size = self._size(sends, expects, kind)
        return self._now(kind, group, size, lambda: exchange(sends, expects, group, kind))

    def start_all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> Handle[dict[int, list[Tensor]]]:
        start = super().start_all_to_all
        size = self._size(sends, expects, kind)
        return self._later(kind, group, size, lambda: start(sends, expects, group, kind))

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        start, size = super().start_all_reduce, sum(part.nbytes for part in parts)
        return self._later(BUCKET + "all_reduce", group, size, lambda: start(parts, group))

    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        start = super().start_all_gather
        return self._later(BUCKET + "all_gather", group, sharding.nbytes, lambda: start(shards, sharding, group, full))

    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        start = super().start_reduce_scatter
        return self._later(BUCKET + "reduce_scatter", group, sharding.nbytes, lambda: start(full, sharding, group))

    def _size(self, sends: Sends, expects: Expects, kind: str) -> int:
        """Bytes of the buffer, as Links count them."""
        sent = sum(tensor.nbytes for peer, each in sends.items() if peer != self.rank for tensor in each)
        came = sum(num_bytes(each) for peer, each in expects.items() if peer != self.rank)
        members = len({*sends, *expects, self.rank})
        if kind in ("all_gather", "reduce_scatter", "all_to_all"):
            # of what crosses links, (n-1)/n of the buffer
            return (
                max(sent // max(members - 1, 1) if kind == "all_gather" else sent, came)
                * members
                // max(members - 1, 1)
            )
        return max(sent, came)

    # -- messages

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        if peer != self.rank:
            self.events.append(Post(peer, tag, sum(tensor.nbytes for tensor in tensors), self._place()))
        with self._carrying():
            super().post(peer, tag, tensors)

    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        if peer != self.rank:
            self.events.append(Take(peer, tag, num_bytes(expects), self._place()))
        with self._carrying():
            return super().take(peer, tag, expects)
