"""Gradient synchronisation in buckets, while backward goes on: the `grad_sync` of a ParallelModule on processes.

In: gradients as they arrive. Out: at the end of backward the complete gradient of every stored part, over replicas
averaged. Promised: sums are started strictly in Program order, whatever order autograd has, so that all ranks start the
same ones; all have ended when backward returns; a parameter that a rank does not reach in some step counts as
zeros; results do not depend on the buckets, to the bit, where the transport adds in group order.

When a gradient is complete on this rank cannot be seen (a recomputed function gives its share by itself), so the first
backward counts arrivals and sums at its end; later ones start a bucket when as many have come. What comes later still,
because somebody used the module otherwise, is summed at the end. Parameters that are not simply summed (used in
another layout than they are stored in) are brought home at the end, one after the other.
A parameter as large as a bucket is its own; smaller ones share one flat tensor. Their gradients are views of it
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from weft.runtime.module import ParallelModule, separate
from weft.runtime.replicas import Replica
from weft.runtime.script import Transfer
from weft.runtime.tape import Tape, Used
from weft.runtime.teams import Team
from weft.runtime.transfers import execute_all, real_dtype
from weft.runtime.transport import Doing, Transport
from weft.runtime.values import Gradient

BUCKET = 4 << 20
"""Bytes of a bucket."""


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> Tensor: ...


@runtime_checkable
class Starts(Protocol):
    """A transport that sums in the background."""

    def start_sum(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> Pending: ...


@dataclass(frozen=True)
class Summed:
    """A parameter whose gradient is a sum over some ranks of the job."""

    name: str
    group: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Bucket:
    """Parameters summed together. `last`: place in Program order of the last one, which is where it is started."""

    group: tuple[int, ...]
    members: list[Summed] = field(default_factory=list)
    last: int = 0
    missing: int = 0
    pending: Pending | None = None

    def __str__(self) -> str:
        others = len(self.members) - 1
        return f"{self.members[0].name} and {others} more" if others else self.members[0].name


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
        self._expected: dict[str, int] | None = None
        self._arrivals: dict[str, int] = {}
        self._num_started = 0

    @property
    def num_buckets(self) -> int:
        return len(self._buckets or ())

    def begin(self, module: ParallelModule) -> None:
        """A backward begins."""
        if self._buckets is None:
            self._buckets = tuple(make_buckets(summed_parameters(module), self._bucket))
            self._place = {one.name: bucket for bucket in self._buckets for one in bucket.members}
        self._arrivals, self._num_started = {}, 0
        for bucket in self._buckets:
            # what never arrived before is not waited for
            bucket.missing = sum((self._expected or {}).get(one.name, 0) > 0 for one in bucket.members)
            bucket.pending = None

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
        if self._expected is None and len(tapes) == 1:
            self._expected = self._arrivals
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
        bucket.pending = start_sum(whole, _taken(module, bucket), bucket.group)
        whole.doing = before

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
        parts = total.reshape(-1).split([one.shape.numel() for one in bucket.members])
        return {one.name: part.view(one.shape) for one, part in zip(bucket.members, parts, strict=True)}

    def _others(self, module: ParallelModule, tapes: Sequence[Tape]) -> Mapping[str, Tensor]:
        """What is not in the buckets: uses in another layout, gradients that other transfers complete."""
        used: dict[str, list[Used]] = {}
        for use in (use for tape in tapes for use in tape.used):
            used.setdefault(use.parameter, []).append(use)
        transport, found = module.transport, {}
        for name, _ in module.sync_order():
            transport.doing = Doing(f"gradient sync of {name}")
            total = Gradient()
            for source in self._sources(module, name, used.get(name, ())):
                for result in execute_all(source.transfers, source.parts, transport, dtype=source.dtype):
                    total.add(result)
            if total.total is not None:
                found[name] = total.total
                if isinstance(transport, Replica | Team) and transport.num_replicas > 1:
                    mean = transport.job.all_reduce(total.total, transport.twins).div_(transport.num_replicas)
                    found[name] = mean
        transport.doing = Doing()
        return separate(found)

    def _sources(self, module: ParallelModule, name: str, used: Sequence[Used]) -> Iterator[_Source]:
        transfers = None if name in self._place else module.sync_transfers(name)
        if transfers is not None:
            held = module.part(name)
            sink = module.sinks.pop(name, Gradient())
            yield _Source([_total(sink, held.shape, held.dtype, module.device)], transfers, held.dtype)
        for use in used:
            dtype = real_dtype(use.dtype)
            parts = [_total(sink, shape, dtype, module.device) for shape, sink in use.leaves]
            yield _Source(parts, use.transfers, dtype)


@dataclass(frozen=True)
class _Source:
    """Gradients of one use of a parameter, and the way home."""

    parts: list[Tensor]
    transfers: tuple[Transfer, ...]
    dtype: torch.dtype


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
            found.append(Summed(name, group, part.shape, part.dtype))
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
        _total(module.sinks.pop(one.name, Gradient()), one.shape, one.dtype, module.device) for one in bucket.members
    ]


def _total(sink: Gradient, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if sink.total is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    assert sink.total.shape == shape, f"a gradient has shape {tuple(sink.total.shape)}, planned {tuple(shape)}"
    return sink.total
