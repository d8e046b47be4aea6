"""Gradient synchronisation: gradients become complete while backward goes on.

In: gradients as they arrive. Out: at the end of backward the complete gradient of every stored part, over replicas
averaged. Promised: reductions are started in the order of the program, so that all ranks start the same ones; all have
ended when backward returns; a parameter that a rank does not reach counts as zeros; results do not depend on the
buckets, to the bit, where the transport adds in group order. The first step is as all others.

A parameter that is used as it is stored is summed in a bucket, which is started when its gradients are complete on this
rank: after one arrival for each backward if one operator reads it (`Part.reads`); if several do, when that of one that
is first used before it arrives, since autograd goes through the program from its end. What comes later still, because
somebody used the module otherwise, is summed at the end. The gradient of a use in another layout is complete when
backward has passed the use (`tape.Used`); it is reduced to the shards that are stored (`grad_scatter.py`).

Products write the gradients of their weights into the buckets (`direct.py`), others are copied there. The gradients are
views of them afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.runtime.layout.execute import execute_all
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing, Group, Handle, listed
from weft.runtime.weights.buckets import BUCKET, FULL, bucket_size, in_buckets
from weft.runtime.weights.gradient import Gradient, Told, total_of
from weft.runtime.weights.products import Direct, Target, Write, products_are_watched
from weft.runtime.weights.separate import separate
from weft.runtime.weights.tape import Tape, Used
from weft.runtime.weights.use_sync import UseSync

if TYPE_CHECKING:
    from weft.runtime.program.module import ParallelModule


@dataclass(frozen=True)
class Summed:
    """A parameter whose gradient is a sum over some ranks of the job.

    Args:
        place: among the parameters, in the order of use.
        reads: how many operators read it.
    """

    name: str
    group: Group
    shape: torch.Size
    dtype: torch.dtype
    place: int = 0
    reads: int = 1

    @property
    def key(self) -> tuple[Group, torch.dtype]:
        return self.group, self.dtype

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
    """Parameters summed together."""

    members: list[Summed]
    missing: set[str] = field(default_factory=set)
    """Those whose gradients are not complete."""
    pending: Handle[Tensor] | None = None
    flat: Tensor | None = None
    """Where the gradients lie end to end, if one was written there."""
    slots: dict[str, Tensor] = field(default_factory=dict)
    """The place of each member in it."""

    @property
    def group(self) -> Group:
        return self.members[0].group

    def __str__(self) -> str:
        return listed([one.name for one in self.members])

    def begin(self) -> None:
        """A step begins."""
        self.missing = {one.name for one in self.members if one.reads}
        self.pending, self.flat, self.slots = None, None, {}

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
    """

    def __init__(self, *, bucket: int = BUCKET) -> None:
        self._size = bucket
        self._buckets: tuple[Bucket, ...] | None = None
        self._place: dict[str, Bucket] = {}
        self._summed: dict[str, Summed] = {}
        self._often: list[Summed] = []
        """Those that several operators read and that are not complete, the first used first."""
        self._told = 0
        self._backwards = 0
        """How many make up this step; 0: nobody knows."""
        self._arrivals: Counter[str] = Counter()
        self._num_started = 0
        self._apart: dict[str, tuple[Transfer, ...] | None] = {}
        """What is not summed in buckets alone: how its gradient becomes complete where it is used as stored."""
        self._uses: UseSync | None = None

    @property
    def num_buckets(self) -> int:
        return len(self._buckets or ())

    def expect(self, backwards: int) -> None:
        """The coming steps whose gradients are held have so many backwards each; 0: nobody knows, nothing is summed
        before the end."""
        self._told = backwards

    def watching(self, module: ParallelModule) -> AbstractContextManager[Any]:
        """What a forward runs under."""
        if products_are_watched():
            return nullcontext()
        if module.sums.compute is not None and module.sums.sent(module.sums.compute) != module.sums.compute:
            # products make gradients in another dtype than they are summed in
            return nullcontext()
        self._prepare(module)
        if not self._buckets and not any(part.keeps for part in module.stored_parts().values()):
            return nullcontext()
        return Direct(_Slots(self, module), module.anchor)

    def _prepare(self, module: ParallelModule) -> None:
        if self._buckets is None:
            self._buckets = tuple(map(Bucket, in_buckets(summed_parameters(module), self._size)))
            self._place = {one.name: bucket for bucket in self._buckets for one in bucket.members}
            self._summed = {one.name: one for bucket in self._buckets for one in bucket.members}
            self._apart = {
                name: None if name in self._place else module.sync_transfers(name) for name, _ in module.sync_order()
            }
            whole = frozenset(n for n, part in module.stored_parts().items() if "gradient" in part.keeps)
            total = sum(prod(part.shape) * part.dtype.itemsize for part in module.trained_parts().values())
            size = bucket_size(total, min(self._size, FULL))
            self._uses = UseSync(module.transport, whole, module.sums, bucket=size)

    def begin(self, module: ParallelModule, *, alone: bool) -> None:
        """A step begins; `alone`: one backward goes through all forwards that there were."""
        self._prepare(module)
        assert self._uses is not None and self._buckets is not None
        self._backwards = self._told if module.holds_gradients else int(alone)
        self._uses.begin(self._backwards, module.holds_gradients)
        self._arrivals, self._num_started = Counter(), 0
        for bucket in self._buckets:
            bucket.begin()
        self._often = sorted((one for one in self._summed.values() if one.reads > 1), key=lambda one: one.place)

    def enter(self, tape: Tape) -> None:
        """Backward begins to go through a forward."""
        assert self._uses is not None
        self._uses.enter(tape)

    def arrived(self, module: ParallelModule, name: str) -> None:
        """Autograd has added to the gradient of a parameter."""
        self._arrivals[name] += 1
        one = self._summed.get(name)
        if one is None or one.reads > 1 or self._arrivals[name] != self._backwards:
            return
        bucket = self._place[name]
        bucket.missing.discard(name)
        while self._backwards == 1 and self._often and self._often[-1].place > one.place:
            later = self._often.pop().name
            self._place[later].missing.discard(later)
        buckets = self._buckets or ()
        while self._num_started < len(buckets) and not buckets[self._num_started].missing:
            self._start(module, buckets[self._num_started])

    def used(self, use: Used) -> None:
        """Something has been added to the gradient of a use in another layout, or backward has passed it."""
        if self._uses is not None:
            self._uses.hear(use)

    def end(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """Backward is over: the complete gradients of what the rank stores."""
        buckets = self._buckets or ()
        while self._num_started < len(buckets):
            self._start(module, buckets[self._num_started])
        found: dict[str, Tensor] = {}
        for bucket in buckets:
            found.update(self._finish(module, bucket))
        for name, gradient in self._others(module, tapes).items():
            found[name] = found[name].add_(gradient) if name in found else gradient
        return found

    def _start(self, module: ParallelModule, bucket: Bucket) -> None:
        """Start the next bucket in the order of the program."""
        self._num_started += 1
        job = module.transport.job
        before, job.doing = job.doing, Doing(f"gradient sync of {bucket}")
        parts = _taken(module, bucket) if bucket.flat is None else [_filled(module, bucket)]
        bucket.pending = job.start_all_reduce(parts, bucket.group)
        job.doing = before

    def buffer(self, module: ParallelModule, name: str) -> Tensor | None:
        """Where to write the first addend of a gradient; None if there is one already, or its sum has begun."""
        bucket = self._place[name]
        if bucket.pending is not None or name in module.sinks:
            return None
        if bucket.flat is None:
            numel = sum(one.numel for one in bucket.members)
            bucket.lay(module.transport.job.buffer(numel, bucket.members[0].dtype, bucket.group))
        return bucket.slots[name]

    def writes(self, use: Used) -> bool:
        """True if products may write the gradient of a use."""
        return self._uses is not None and self._uses.scatters(use.transfers)

    def buffer_of_use(self, use: Used, dtype: torch.dtype) -> Tensor | None:
        """Where to write the first addend of the gradient of a use; None if it may lie anywhere."""
        return None if self._uses is None else self._uses.buffer(use, dtype)

    def has_place(self, name: str) -> bool:
        return name in self._place

    def _finish(self, module: ParallelModule, bucket: Bucket) -> dict[str, Tensor]:
        """Wait for a bucket, and for what came too late for it."""
        job = module.transport.job
        job.doing = Doing(f"gradient sync of {bucket}")
        assert bucket.pending is not None
        total, bucket.pending = bucket.pending.wait(), None
        if any(one.name in module.sinks for one in bucket.members):
            total = total + job.start_all_reduce(_taken(module, bucket), bucket.group).wait()
        if (replicas := module.transport.num_replicas) > 1:
            total = total.div_(replicas)
        job.doing = Doing()
        return bucket.cut(total)

    def _others(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """What is not in the buckets: uses in another layout, gradients that other transfers complete."""
        transport, found = module.transport, {}
        assert self._uses is not None
        used = self._uses.end(tapes, list(self._apart))
        replicas = transport.num_replicas
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
                    assert held is not None
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
        buffer = self.sync.buffer_of_use(use, dtype) if sink.total is None else None
        if buffer is None:
            sink.add(make(None))
        else:
            sink.begin(make(buffer))

    def _write_stored(self, name: str, make: Write) -> None:
        buffer = self.sync.buffer(self.module, name)
        if buffer is not None:
            self.module.sinks[name] = Gradient(make(buffer))
        else:
            self.module.sinks.setdefault(name, Gradient()).add(make(None))
        self.sync.arrived(self.module, name)


def summed_parameters(module: ParallelModule) -> list[Summed]:
    """The parameters whose gradients, where they are used as stored, one sum makes complete; in the order in which they
    become complete."""
    found, transport = [], module.transport
    order = list(module.sync_order())
    for at, (name, stored) in enumerate(order):
        transfers = module.sync_transfers(name)
        if transfers is None or len(transfers) > 1 or any(one.kind != "all_reduce" for one in transfers):
            continue
        part = module.part(name)
        group = transport.everywhere(transfers[0].group if transfers else (transport.rank,))
        if len(group) > 1:
            dtype = module.sums.sent(part.dtype)
            found.append(Summed(name, group, part.shape, dtype, len(order) - at, stored.reads))
    return found


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
