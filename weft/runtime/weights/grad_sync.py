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

Products write the gradients of their weights into the buckets (`products.py`), others are copied there. The gradients
are views of them afterwards.
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
from weft.runtime.weights.gradient import Gradient, total_of
from weft.runtime.weights.products import Direct, Target, Write, products_are_watched
from weft.runtime.weights.separate import separate
from weft.runtime.weights.tape import Tape, UseGradient
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
        if self.pending is not None:
            # the one before was left by an error, and all have begun this sum
            self.pending.wait()
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


class GradSync:
    """Completes the gradients of one module on one rank.

    Args:
        bucket: bytes.
    """

    def __init__(self, module: ParallelModule, *, bucket: int = BUCKET) -> None:
        self._module, self._size = module, bucket
        self._often: list[Summed] = []
        """Those that several operators read and that are not complete, the first used first."""
        self._expected = 0
        self._backwards = 0
        """How many make up this step; 0: nobody knows."""
        self._arrivals: Counter[str] = Counter()
        self._num_started = 0

    # What is found when the module is first used: its precision is known by then.

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are started."""
        return tuple(map(Bucket, in_buckets(summed_parameters(self._module), self._size)))

    @cached_property
    def _summed(self) -> dict[str, tuple[Summed, Bucket]]:
        return {one.name: (one, bucket) for bucket in self.buckets for one in bucket.members}

    @cached_property
    def _apart(self) -> dict[str, tuple[Transfer, ...] | None]:
        """What is not summed in buckets alone: how its gradient becomes complete where it is used as stored."""
        module = self._module
        return {name: None if name in self._summed else module.sync_transfers(name) for name, _ in module.sync_order()}

    @cached_property
    def uses(self) -> UseSync:
        """The uses in another layout."""
        total = sum(prod(part.shape) * part.dtype.itemsize for part in self._module.trained_parts().values())
        return UseSync(self._module, bucket=bucket_size(total, min(self._size, FULL)))

    def expect(self, backwards: int) -> None:
        """The coming steps whose gradients are held have so many backwards each; 0: nobody knows, nothing is summed
        before the end."""
        self._expected = backwards

    def watching(self) -> AbstractContextManager[Any]:
        """What a forward runs under."""
        module, sums = self._module, self._module.sums
        if products_are_watched():
            return nullcontext()
        if sums.compute is not None and sums.sent(sums.compute) != sums.compute:
            # products make gradients in another dtype than they are summed in
            return nullcontext()
        if not self.buckets and not any(part.keeps for part in module.stored_parts().values()):
            return nullcontext()
        return Direct(self, module.anchor)

    def begin(self, *, alone: bool) -> None:
        """A step begins; `alone`: one backward goes through all forwards that there were."""
        held = self._module.holds_gradients
        self._backwards = self._expected if held else int(alone)
        self.uses.begin(self._backwards, held)
        self._arrivals, self._num_started = Counter(), 0
        for bucket in self.buckets:
            bucket.begin()
        often = (one for one, _ in self._summed.values() if one.reads > 1)
        self._often = sorted(often, key=lambda one: one.place)

    def arrived(self, name: str) -> None:
        """Autograd has added to the gradient of a parameter."""
        self._arrivals[name] += 1
        one, bucket = self._summed.get(name, (None, None))
        if one is None or bucket is None or one.reads > 1 or self._arrivals[name] != self._backwards:
            return
        bucket.missing.discard(name)
        while self._backwards == 1 and self._often and self._often[-1].place > one.place:
            later = self._often.pop().name
            self._summed[later][1].missing.discard(later)
        while self._num_started < len(self.buckets) and not self.buckets[self._num_started].missing:
            self._start(self.buckets[self._num_started])

    def end(self, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """Backward is over: the complete gradients of what the rank stores."""
        while self._num_started < len(self.buckets):
            self._start(self.buckets[self._num_started])
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            found.update(self._finish(bucket))
        for name, gradient in self._others(tapes).items():
            found[name] = found[name].add_(gradient) if name in found else gradient
        return found

    def _start(self, bucket: Bucket) -> None:
        """Start the next bucket in the order of the program."""
        self._num_started += 1
        job = self._module.transport.job
        before, job.doing = job.doing, Doing(f"gradient sync of {bucket}")
        parts = self._taken(bucket) if bucket.flat is None else [self._filled(bucket)]
        bucket.pending = job.start_all_reduce(parts, bucket.group)
        job.doing = before

    def _taken(self, bucket: Bucket) -> list[Tensor]:
        """The gradients of a bucket as they are now, zeros for those that have none. They are taken out of the
        sinks."""
        module = self._module
        return [
            total_of(module.sinks.pop(one.name, Gradient()), one.shape, one.dtype, module.device)
            for one in bucket.members
        ]

    def _filled(self, bucket: Bucket) -> Tensor:
        """The same in the memory that some of them were written to."""
        for name, slot in bucket.slots.items():
            sink = self._module.sinks.pop(name, None)
            if sink is None or sink.total is None:
                slot.zero_()
            elif sink.total.data_ptr() != slot.data_ptr():
                slot.copy_(sink.total)
        return bucket.leave()

    def _finish(self, bucket: Bucket) -> dict[str, Tensor]:
        """Wait for a bucket, and for what came too late for it."""
        transport = self._module.transport
        job = transport.job
        job.doing = Doing(f"gradient sync of {bucket}")
        assert bucket.pending is not None
        total, bucket.pending = bucket.pending.wait(), None
        if any(one.name in self._module.sinks for one in bucket.members):
            total = total + job.start_all_reduce(self._taken(bucket), bucket.group).wait()
        if transport.num_replicas > 1:
            total = total.div_(transport.num_replicas)
        job.doing = Doing()
        return bucket.cut(total)

    def _others(self, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """What is not in the buckets: uses in another layout, gradients that other transfers complete."""
        module, transport, found = self._module, self._module.transport, {}
        used = self.uses.end(tapes, list(self._apart))
        replicas = transport.num_replicas
        for name, transfers in self._apart.items():
            if transfers is None and name not in used and tapes:
                # it came in a bucket
                continue
            total = self._as_stored(name)
            if name in used:
                total.add(used[name])
            held = module.part(name)
            if total.total is None and not tapes and held is not None and name not in self._summed:
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

    def _as_stored(self, name: str) -> Gradient:
        """The gradient of a parameter that is used as it is stored and not in a bucket."""
        module, transfers, found = self._module, self._apart[name], Gradient()
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

    # What products write to.

    def target(self, weight: Tensor) -> Target | None:
        """Where the gradient of a weight is written: its bucket, or that of the use that it stands for."""
        name = self._module.unwatched(weight)
        if name is not None:
            return partial(self._write_stored, name) if weight.is_leaf and name in self._summed else None
        leaf = self._module.tape.known(weight) if weight.is_leaf else None
        sink = None if leaf is None else leaf.sink
        if not isinstance(sink, UseGradient) or len(sink.use.leaves) != 1 or sink.use.frozen:
            return None
        if not self.uses.scatters(sink.use.transfers):
            return None
        return partial(self._write_use, sink, weight.dtype)

    def _write_use(self, sink: UseGradient, dtype: torch.dtype, make: Write) -> None:
        buffer = self.uses.buffer(sink.use, dtype) if sink.total is None else None
        if buffer is None:
            sink.add(make(None))
        else:
            sink.begin(make(buffer))

    def _write_stored(self, name: str, make: Write) -> None:
        buffer = self._buffer(name)
        if buffer is not None:
            self._module.sinks[name] = Gradient(make(buffer))
        else:
            self._module.sinks.setdefault(name, Gradient()).add(make(None))
        self.arrived(name)

    def _buffer(self, name: str) -> Tensor | None:
        """Where to write the first addend of a gradient; None if there is one already, or its sum has begun."""
        bucket = self._summed[name][1]
        if bucket.pending is not None or name in self._module.sinks:
            return None
        if bucket.flat is None:
            numel = sum(one.numel for one in bucket.members)
            bucket.lay(self._module.transport.job.buffer(numel, bucket.members[0].dtype, bucket.group))
        return bucket.slots[name]


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
