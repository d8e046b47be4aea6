"""Gradient synchronisation in buckets, while backward goes on: the `grad_sync` of a ParallelModule on processes.

In: gradients as they arrive. Out: at the end of backward the complete gradient of every stored part, over replicas
averaged. Promised: sums are started strictly in Program order, whatever order autograd has, so that all ranks start the
same ones; all have ended when backward returns; a parameter that a rank does not reach in some step counts as
zeros; results do not depend on the buckets, to the bit, where the transport adds in group order.

When a gradient is complete on this rank cannot be seen (a recomputed function gives its share by itself), so the first
step counts arrivals and sums at its end; later ones of as many backwards start a bucket when as many have come. What
comes later still, because somebody used the module otherwise, is summed at the end. What is used in another layout than
it is stored in goes home use by use (`use_sync.py`).
A parameter as large as a bucket is its own; smaller ones share one flat tensor. Products write the gradients of their
weights into it (`products.py`), others are copied there. The gradients are views of it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from weft.runtime.module import ParallelModule, separate
from weft.runtime.products import Direct, Target, Write, products_are_watched
from weft.runtime.replicas import Replica
from weft.runtime.script import Transfer
from weft.runtime.tape import Tape, Used
from weft.runtime.teams import Team
from weft.runtime.transfers import execute_all
from weft.runtime.transport import Doing, Transport, listed
from weft.runtime.use_sync import UseSync
from weft.runtime.values import Gradient, Told, total_of

BUCKET = 32 << 20
"""Bytes of a bucket."""


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> Tensor: ...


@runtime_checkable
class Starts(Protocol):
    """A transport that sums in the background."""

    def start_sum(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> Pending: ...

    def room(self, numel: int, dtype: torch.dtype, group: tuple[int, ...]) -> Tensor:
        """A flat tensor whose sum is best started."""
        ...


@dataclass(frozen=True)
class Summed:
    """A parameter whose gradient is a sum over some ranks of the job."""

    name: str
    group: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def numel(self) -> int:
        return self.shape.numel()

    @cached_property
    def strides(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()


@dataclass
class Bucket:
    """Parameters summed together. `last`: place in Program order of the last one, which is where it is started."""

    group: tuple[int, ...]
    members: list[Summed] = field(default_factory=list)
    last: int = 0
    missing: int = 0
    pending: Pending | None = None
    flat: Tensor | None = None
    """Where the gradients lie end to end, if one was written there."""
    slots: dict[str, Tensor] = field(default_factory=dict)
    """The place of each member in it."""

    def __str__(self) -> str:
        return listed([one.name for one in self.members])

    def begin(self, expected: Mapping[str, int]) -> None:
        """A backward begins; how often each gradient arrives in it. What never arrived before is not waited for."""
        self.missing = sum(expected.get(one.name, 0) > 0 for one in self.members)
        self.pending = self.flat = None
        self.slots = {}

    def lay(self, flat: Tensor) -> None:
        """Let the gradients lie here."""
        self.flat, self.slots = flat, self.cut(flat)

    def leave(self) -> Tensor:
        """Forget where the gradients lie: the memory is the sum's now."""
        assert self.flat is not None
        flat, self.flat, self.slots = self.flat, None, {}
        return flat

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Each member's part of a flat tensor."""
        # not split and viewed: that takes four times as long, for each of many
        found, start = {}, flat.storage_offset()
        for one in self.members:
            found[one.name] = flat.as_strided(one.shape, one.strides, start)
            start += one.numel
        return found


class BucketSync:
    """Completes the gradients of one module on one rank.

    Args:
        bucket: bytes.
        overlap: start sums while backward goes on, where the transport can.
    """

    def __init__(self, *, bucket: int = BUCKET, overlap: bool = True) -> None:
        self._bucket, self._overlap = bucket, overlap
        self._buckets: tuple[Bucket, ...] | None = None
        self._place: dict[str, Bucket] = {}
        self._backwards = 1
        self._learned: dict[int, dict[str, int]] = {}
        """By number of backwards in a step, how often each gradient arrives."""
        self._arrivals: dict[str, int] = {}
        self._num_started = 0
        self._apart: dict[str, tuple[Transfer, ...] | None] = {}
        """What is not summed in buckets alone: how its gradient becomes complete where it is used as stored."""
        self._uses: UseSync | None = None

    @property
    def num_buckets(self) -> int:
        return len(self._buckets or ())

    @property
    def _expected(self) -> dict[str, int] | None:
        return self._learned.get(self._backwards)

    def expect(self, backwards: int) -> None:
        """The coming steps have so many backwards each; 0: nobody knows, nothing is summed before the end."""
        self._backwards = backwards

    def watching(self, module: ParallelModule) -> AbstractContextManager[Any]:
        """What a forward runs under."""
        starts = self._overlap and isinstance(job_of(module), Starts)
        if not starts or products_are_watched():
            return nullcontext()
        if module.sums.compute is not None and module.sums.sent(module.sums.compute) != module.sums.compute:
            # products make gradients in another dtype than they are summed in
            return nullcontext()
        # from the first step on: products that share a weight arrive one by one, to autograd they are one arrival
        self._prepare(module)
        if not self._buckets and not any(part.keeps for part in module.stored_parts().values()):
            return nullcontext()
        return Direct(_Slots(self, module), module.anchor)

    def _prepare(self, module: ParallelModule) -> None:
        if self._buckets is None:
            self._buckets = tuple(make_buckets(summed_parameters(module), self._bucket))
            self._place = {one.name: bucket for bucket in self._buckets for one in bucket.members}
            self._apart = {
                name: None if name in self._place else module.sync_transfers(name) for name, _ in module.sync_order()
            }
            whole = frozenset(n for n, part in module.stored_parts().items() if "gradient" in part.keeps)
            self._uses = UseSync(module.transport, whole, module.sums, together=self._overlap)

    def begin(self, module: ParallelModule) -> None:
        """A backward begins."""
        self._prepare(module)
        assert self._uses is not None and self._buckets is not None
        self._uses.begin(self._backwards)
        self._arrivals, self._num_started = {}, 0
        for bucket in self._buckets:
            bucket.begin(self._expected or {})

    def arrived(self, module: ParallelModule, name: str) -> None:
        """Autograd has added to the gradient of a parameter."""
        self._arrivals[name] = self._arrivals.get(name, 0) + 1
        if self._expected is None or name not in self._place or not self._overlap:
            return
        if self._arrivals[name] == self._expected.get(name, 0):
            bucket = self._place[name]
            bucket.missing -= 1
            if bucket.missing == 0:
                self._start_ready(module)

    def used(self, module: ParallelModule, tape: Tape, number: int, *, last: bool) -> None:
        """Something has been added to the gradient of a use in another layout, or, if `last`, no more will be."""
        if self._uses is not None:
            (self._uses.ended if last else self._uses.arrived)(tape, number)

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """Backward is over: the complete gradients of what the rank stores."""
        buckets = self._buckets or ()
        while self._num_started < len(buckets):
            self._start(module, buckets[self._num_started])
        found: dict[str, Tensor] = {}
        for bucket in buckets:
            found.update(self._finish(module, bucket))
        others = self._others(module, tapes)
        for name, gradient in others.items():
            found[name] = found[name].add_(gradient) if name in found else gradient
        if self._expected is None and len(tapes) == self._backwards:
            self._learned[self._backwards] = self._arrivals
        return found

    def _start_ready(self, module: ParallelModule) -> None:
        buckets, whole = self._buckets or (), job_of(module)
        if isinstance(whole, Starts):
            while self._num_started < len(buckets) and buckets[self._num_started].missing == 0:
                self._start(module, buckets[self._num_started])

    def _start(self, module: ParallelModule, bucket: Bucket) -> None:
        """Start the next bucket in Program order."""
        self._num_started += 1
        whole = job_of(module)
        before, whole.doing = whole.doing, Doing(f"gradient sync of {bucket}")
        parts = _taken(module, bucket) if bucket.flat is None else [_filled(module, bucket)]
        bucket.pending = start_sum(whole, parts, bucket.group)
        whole.doing = before

    def room(self, module: ParallelModule, name: str) -> Tensor | None:
        """Where to write the first addend of a gradient; None if there is one already, or its sum has begun."""
        bucket = self._place[name]
        if bucket.pending is not None or name in module.sinks:
            return None
        if bucket.flat is None:
            whole = job_of(module)
            assert isinstance(whole, Starts)
            numel = sum(one.numel for one in bucket.members)
            bucket.lay(whole.room(numel, bucket.members[0].dtype, bucket.group))
        return bucket.slots[name]

    def writes(self, use: Used) -> bool:
        """True if products may write the gradient of a use."""
        return self._uses is not None and self._uses.goes(use.transfers)

    def room_of_use(self, use: Used, dtype: torch.dtype) -> Tensor | None:
        """Where to write the first addend of the gradient of a use; None if it may lie anywhere."""
        return None if self._uses is None else self._uses.room(use, dtype)

    def has_place(self, name: str) -> bool:
        return name in self._place

    def _finish(self, module: ParallelModule, bucket: Bucket) -> dict[str, Tensor]:
        """Wait for a bucket, and for what came too late for it."""
        whole = job_of(module)
        whole.doing = Doing(f"gradient sync of {bucket}")
        assert bucket.pending is not None
        total, bucket.pending = bucket.pending.wait(), None
        late = any(one.name in module.sinks for one in bucket.members)
        if late:
            total = total + start_sum(whole, _taken(module, bucket), bucket.group).wait()
        if (replicas := num_replicas(module)) > 1:
            total = total.div_(replicas)
        whole.doing = Doing()
        return bucket.cut(total)

    def _others(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """What is not in the buckets: uses in another layout, gradients that other transfers complete."""
        transport, found = module.transport, {}
        assert self._uses is not None
        used = self._uses.end(tapes, list(self._apart))
        replicas = num_replicas(module)
        for name, transfers in self._apart.items():
            if transfers is None and name not in used and tapes:
                # it came in a bucket
                continue
            sink = module.sinks.get(name)
            if transfers == () and sink is not None and sink.total is not None and name not in used and replicas == 1:
                # it goes nowhere, and is not rounded for it
                found[name] = sink.total
                continue
            total = self._as_stored(module, name)
            if name in used:
                total.add(used[name])
            held = module.part(name)
            if total.total is None and not tapes and held is not None and name not in self._place:
                # no batch came by here, and other replicas wait for their mean
                total.add(torch.zeros(held.shape, dtype=held.dtype, device=module.device))
            if total.total is not None:
                found[name] = total.total
                if replicas > 1:
                    assert isinstance(transport, Replica | Team) and held is not None
                    transport.doing = Doing(f"gradient sync of {name}")
                    part = total_of(total, held.shape, module.sums.sent(held.dtype), module.device)
                    found[name] = transport.job.all_reduce(part, transport.twins).div_(replicas)
        transport.doing = Doing()
        return separate(found)

    def _as_stored(self, module: ParallelModule, name: str) -> Gradient:
        """The gradient of a parameter that is used as it is stored and not in a bucket."""
        transfers, found = self._apart[name], Gradient()
        if transfers is not None:
            held, sink = module.part(name), module.sinks.pop(name, Gradient())
            sent = module.sums.sent(held.dtype)
            if not transfers:
                # it goes nowhere, and is not rounded for it
                return Gradient(sink.total if sink.total is not None else total_of(sink, held.shape, sent, held.device))
            part = total_of(sink, held.shape, sent, module.device)
            module.transport.doing = Doing(f"gradient sync of {name}")
            for result in execute_all(transfers, [part], module.transport, dtype=sent):
                found.add(result)
        return found


@dataclass(frozen=True)
class _Slots:
    """The buckets of a module, as products see them that write into them."""

    sync: BucketSync
    module: ParallelModule

    def target(self, weight: Tensor) -> Target | None:
        name = self.module.unwatched(weight)
        if name is not None:
            return partial(self._write_stored, name) if weight.is_leaf and self.sync.has_place(name) else None
        found = self.module.tape.told_of(weight) if weight.is_leaf else None
        if found is None or not self.sync.writes(found[0]):
            return None
        return partial(self._write_use, *found, weight.dtype)

    def _write_use(self, use: Used, sink: Told, dtype: torch.dtype, make: Write) -> None:
        room = self.sync.room_of_use(use, dtype) if sink.total is None else None
        if room is None:
            sink.add(make(None))
        else:
            sink.begin(make(room))

    def _write_stored(self, name: str, make: Write) -> None:
        room = self.sync.room(self.module, name)
        if room is not None:
            self.module.sinks[name] = Gradient(make(room))
        else:
            self.module.sinks.setdefault(name, Gradient()).add(make(None))
        self.sync.arrived(self.module, name)


def job_of(module: ParallelModule) -> Transport:
    """The transport of all ranks of the job."""
    transport = module.transport
    return transport.job if isinstance(transport, Replica | Team) else transport


def num_replicas(module: ParallelModule) -> int:
    return module.transport.num_replicas if isinstance(module.transport, Replica | Team) else 1


def summed_parameters(module: ParallelModule) -> list[Summed]:
    """The parameters whose gradients, where they are used as stored, one sum makes complete; in Program order."""
    found = []
    for name, _ in module.sync_order():
        transfers = module.sync_transfers(name)
        if transfers is None or len(transfers) > 1 or any(one.kind != "all_reduce" for one in transfers):
            continue
        transport, part = module.transport, module.part(name)
        group = transfers[0].group if transfers else (transport.rank,)
        if isinstance(transport, Replica | Team):
            group = transport.everywhere(group)
        if len(group) > 1:
            found.append(Summed(name, group, part.shape, module.sums.sent(part.dtype)))
    return found


def make_buckets(summed: Sequence[Summed], size: int = BUCKET) -> list[Bucket]:
    """Buckets in the order in which they are started.

    Parameters of one group and dtype share a bucket until it is full, also if others stand between them."""
    made: list[Bucket] = []
    unfilled: dict[Any, Bucket] = {}
    for place, one in enumerate(summed):
        key, alone = (one.group, one.dtype), one.num_bytes >= size
        bucket = None if alone else unfilled.get(key)
        if bucket is None:
            bucket = Bucket(one.group)
            made.append(bucket)
        bucket.members.append(one)
        bucket.last = place
        if not alone:
            unfilled[key] = bucket
            if sum(member.num_bytes for member in bucket.members) >= size:
                del unfilled[key]
    return sorted(made, key=lambda bucket: bucket.last)


def start_sum(transport: Transport, parts: Sequence[Tensor], group: tuple[int, ...]) -> Pending:
    """A sum in the background where the transport can, at once where it cannot."""
    if isinstance(transport, Starts):
        return transport.start_sum(parts, group)
    return _Done(transport.all_reduce(torch.cat([part.detach().reshape(-1) for part in parts]), group))


@dataclass(frozen=True)
class _Done:
    total: Tensor

    def wait(self) -> Tensor:
        return self.total


def _taken(module: ParallelModule, bucket: Bucket) -> list[Tensor]:
    """The gradients of a bucket as they are now, zeros for those that have none. They are taken out of the sinks."""
    return [
        total_of(module.sinks.pop(one.name, Gradient()), one.shape, one.dtype, module.device) for one in bucket.members
    ]


def _filled(module: ParallelModule, bucket: Bucket) -> Tensor:
    """The same in the memory that some of them were written to."""
    for name, slot in bucket.slots.items():
        sink = module.sinks.pop(name, None)
        if sink is None or sink.total is None:
            slot.zero_()
        elif sink.total.data_ptr() != slot.data_ptr():
            slot.copy_(sink.total)
    return bucket.leave()
