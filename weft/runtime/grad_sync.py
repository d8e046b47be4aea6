"""Gradient synchronisation: sums over ranks, in buckets, while backward goes on.

In: trained parameters in Program order, which is the order in which their gradients become complete, each with the
ranks over which its gradient is summed. Out: after `loss.backward()` every `.grad` is the sum, divided where replicas
are averaged. Promised: sums are started strictly in Program order, whatever order autograd has, so that all ranks start
the same ones; all have ended when backward returns; a gradient that was there before (accumulation) is added to,
once; a parameter that a rank does not reach in some step counts as zeros. A parameter as large as a bucket is its own
bucket and is summed where it lies; smaller ones share one flat tensor, of which their gradients are views afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from weft.runtime.transport import Doing, Transport

BUCKET = 4 << 20
"""Bytes of a bucket."""


@dataclass(frozen=True)
class Synced:
    """A parameter whose gradient is summed over `group`, ranks of the transport, and divided by `divisor`."""

    name: str
    parameter: nn.Parameter
    group: tuple[int, ...]
    divisor: int = 1


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> Tensor: ...


@runtime_checkable
class Starts(Protocol):
    """A transport that sums in the background."""

    def start_all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Pending: ...


@dataclass
class Bucket:
    """Parameters summed together. `last`: place in Program order of the last one, which is where it is started."""

    group: tuple[int, ...]
    divisor: int
    members: list[Synced] = field(default_factory=list)
    last: int = 0
    missing: int = 0
    pending: Pending | None = None

    @property
    def num_bytes(self) -> int:
        return sum(member.parameter.nbytes for member in self.members)


class GradSync:
    """Synchronises gradients of one rank; lives as long as its parameters.

    Args:
        synced: in Program order; parameters summed over no other rank may be among them.
        bucket: bytes.
    """

    def __init__(self, synced: Sequence[Synced], transport: Transport, *, bucket: int = BUCKET) -> None:
        self._transport = transport
        self._buckets = tuple(make_buckets(synced, bucket))
        self._place = {id(one.parameter): bucket for bucket in self._buckets for one in bucket.members}
        self._names = {id(one.parameter): one.name for one in synced}
        self._before: dict[int, Tensor] = {}
        self._ready: set[int] = set()
        self._num_started = 0
        self._active = False
        for bucket_ in self._buckets:
            for one in bucket_.members:
                one.parameter.register_hook(self._put_aside(one.parameter))
                one.parameter.register_post_accumulate_grad_hook(self._mark_ready)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def begin(self) -> None:
        """A backward has begun. Called in it, by whatever is reached on every rank; hooks call it too."""
        if not self._active:
            self._active = True
            self._ready.clear()
            self._num_started = 0
            for bucket in self._buckets:
                bucket.missing, bucket.pending = len(bucket.members), None
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _put_aside(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        """Before autograd adds to `.grad`: what is there has been summed already and must not be summed again."""

        def hook(gradient: Tensor) -> None:
            if parameter.grad is not None:
                self._before[id(parameter)] = parameter.grad
                parameter.grad = None

        return hook

    def _mark_ready(self, parameter: Tensor) -> None:
        self.begin()
        assert id(parameter) not in self._ready, f"{self._names[id(parameter)]} got two gradients in one backward"
        self._ready.add(id(parameter))
        self._place[id(parameter)].missing -= 1
        if isinstance(self._transport, Starts):
            while self._num_started < len(self._buckets) and self._buckets[self._num_started].missing == 0:
                self._start()

    def _start(self) -> None:
        """Start the next bucket in Program order."""
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        flat = _flat([_gradient_of(one.parameter) for one in bucket.members])
        doing, self._transport.doing = self._transport.doing, Doing(f"gradient sync of {_text(bucket)}")
        if isinstance(self._transport, Starts):
            bucket.pending = self._transport.start_all_reduce(flat, bucket.group)
        else:
            bucket.pending = _Done(self._transport.all_reduce(flat, bucket.group))
        self._transport.doing = doing

    def _finish(self) -> None:
        """At the end of backward: start what is left, wait for all, put the sums in place."""
        self._active = False
        for bucket in self._buckets:
            for one in bucket.members if bucket.missing else ():
                if one.parameter.grad is not None and id(one.parameter) not in self._ready:
                    self._before[id(one.parameter)] = one.parameter.grad
                    one.parameter.grad = None
        while self._num_started < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            assert bucket.pending is not None
            self._transport.doing = Doing(f"gradient sync of {_text(bucket)}")
            total = bucket.pending.wait()
            bucket.pending = None
            self._place_sums(bucket, total if bucket.divisor == 1 else total.div_(bucket.divisor))
        self._transport.doing = Doing()

    @torch.no_grad()
    def _place_sums(self, bucket: Bucket, total: Tensor) -> None:
        parts = total.reshape(-1).split([one.parameter.numel() for one in bucket.members])
        for one, part in zip(bucket.members, parts, strict=True):
            gradient = part.view(one.parameter.shape)
            before = self._before.pop(id(one.parameter), None)
            one.parameter.grad = gradient if before is None else before.add_(gradient)


@dataclass(frozen=True)
class _Done:
    total: Tensor

    def wait(self) -> Tensor:
        return self.total


def make_buckets(synced: Sequence[Synced], size: int = BUCKET) -> list[Bucket]:
    """Buckets in the order in which they are started.

    Parameters of one group and dtype share a bucket until it is full, also if others stand between them."""
    made: list[Bucket] = []
    unfilled: dict[Any, Bucket] = {}
    for place, one in enumerate(synced):
        if len(one.group) < 2 and one.divisor == 1:
            continue
        key = (one.group, one.divisor, one.parameter.dtype, one.parameter.device)
        alone = one.parameter.nbytes >= size
        bucket = None if alone else unfilled.get(key)
        if bucket is None:
            bucket = Bucket(one.group, one.divisor)
            made.append(bucket)
        bucket.members.append(one)
        bucket.last = place
        if not alone:
            unfilled[key] = bucket
            if bucket.num_bytes >= size:
                del unfilled[key]
    return sorted(made, key=lambda bucket: bucket.last)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    if len(gradients) == 1:
        return gradients[0].detach().contiguous()
    return torch.cat([gradient.detach().reshape(-1) for gradient in gradients])


def _text(bucket: Bucket) -> str:
    first = bucket.members[0].name
    others = len(bucket.members) - 1
    return f"{first} and {others} more" if others else first
