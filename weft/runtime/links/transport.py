"""Transport: how ranks talk. The interface, its errors, and the view of one group.

A call that begins with `start_` returns a Handle, and may go on while the rank computes: `wait` gives the result. It
takes several tensors at once. All members start such calls in one order, that of the program, and they end in it. A
transport that has no background carries them out at once: `start_...(...).wait()` is the synchronous call.

A collective call is identified by its group and its number among the calls that this rank has made in that group.
Every member must make the same call: another kind, operation, shape or dtype is an error that names both sides, never
a wrong number or a hang. Results are private: no tensor that enters or leaves a call shares memory with another rank.
`all_to_all` carries every Transfer that is not an all_reduce; `kind` says what shape it has (all_gather,
reduce_scatter, all_to_all, exchange), so that a backend may carry it by the collective that it does best.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from weft.errors import RunError
from weft.runtime.layout.index import narrowed, put, take
from weft.runtime.layout.sharding import Sharding
from weft.runtime.layout.transfer import Index
from weft.runtime.program.lines import place_here
from weft.runtime.watch.progress import Began

Group = tuple[int, ...]
"""Ranks; all members name them in the same order, which is that of sums."""
Expected = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor to come."""


@dataclass(frozen=True)
class Doing:
    """What a rank is busy with, for messages: an op or a reshard, and the user's source line."""

    what: str = ""
    place: str = ""

    def __str__(self) -> str:
        text = f"in {self.what}" if self.what else "outside any op"
        return f"{text} at {self.place}" if self.place else text


def listed(names: Sequence[str]) -> str:
    """Names in few words: the first, and how many more."""
    others = len(names) - 1
    return f"{names[0]} and {others} more" if others else names[0]


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """A rank raised; the others were stopped. The original exception is `__cause__`."""

    def __init__(self, rank: int, doing: Doing, cause: BaseException) -> None:
        self.rank, self.op, self.place = rank, doing.what, doing.place
        super().__init__(f"rank {rank} failed {doing}: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class CollectiveMismatch(RunError):  # noqa: N818 - says what happened
    """Ranks entered collectives that do not fit together, or wait for ones that nobody will enter.

    `waits` tells for every rank what it was doing, `first` is what is wrong in one line."""

    def __init__(self, message: str, *, rank: int, waits: Mapping[int, str]) -> None:
        self.rank, self.waits, self.first = rank, dict(waits), message
        super().__init__("\n".join([message, *told_waits(self.waits)]), remedy=ALIKE)


class PeerLost(RunError):  # noqa: N818 - says what happened
    """A collective broke because another process went away."""

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy=LOST)


class PeerFailed(RunError):  # noqa: N818 - says what happened
    """Another rank failed, and all end: raised where this one comes to its next collective."""


ALIKE = (
    "let every rank make the same calls with the same batches: a rank that catches an error, or leaves out a batch or "
    "a backward, does not; one that is only slow needs a larger timeout; if they all do, this is a fault in the "
    "program: please report it with the plan"
)
LOST = (
    "see what the process that has gone printed, or whether the system killed it for want of memory; then start again"
)


def told_waits(waits: Mapping[int, str]) -> list[str]:
    """What every rank was doing, a line each."""
    return [f"  rank {who} {what}" for who, what in sorted(waits.items())]


class Stopped(BaseException):
    """Raised inside a rank because another one failed. Never leaves the runtime.

    Not an `Exception`, so that no handler in a user's operator swallows it."""


T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A call that was started."""

    def wait(self) -> T_co:
        """Its result, when it is there."""
        ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """A call that has ended."""

    result: T

    def wait(self) -> T:
        return self.result


class Then(Generic[S, T]):
    """A call, and what is made of its result when it is first waited for."""

    def __init__(self, handle: Handle[S], make: Callable[[S], T]) -> None:
        self._waiting: tuple[Handle[S], Callable[[S], T]] | None = (handle, make)

    def wait(self) -> T:
        if self._waiting is not None:
            (handle, make), self._waiting = self._waiting, None
            self._result = make(handle.wait())
        return self._result


Sends = Mapping[int, Sequence[Tensor]]
Expects = Mapping[int, Sequence[Expected]]


class Transport(ABC):
    """One rank's way to the others. `group` lists ranks; all members pass the same tuple."""

    rank: int
    num_ranks: int
    device: torch.device
    """Where the rank's tensors live."""
    by_block: bool = False
    """Whether weights and their gradients are best sent a block of the model at a time: a call costs more than waiting
    for what it brings."""
    doing: Doing
    """Kept up to date by whoever runs; read when something goes wrong."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
        """Sum (or max, min, prod) over the group, added in the order of `group`: equal bit for bit on all members."""

    @abstractmethod
    def all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> dict[int, list[Tensor]]:
        """Send tensors to peers and receive theirs. Members without pieces take part too."""

    def all_gather(
        self,
        tensor: Tensor,
        group: Group,
        *,
        shapes: Sequence[tuple[int, ...]] | None = None,
        kind: str = "all_gather",
        copies: bool = True,
    ) -> list[Tensor]:
        """The members' tensors in the order of `group`, of one dtype.

        Args:
            shapes: of each; all have one if not given.
            copies: False if the rank's own may be the tensor itself.
        """
        each = zip(group, shapes or [tuple(tensor.shape)] * len(group), strict=True)
        expects = {peer: [(shape, tensor.dtype)] for peer, shape in each if peer != self.rank}
        came = self.all_to_all({peer: [tensor] for peer in expects}, expects, group, kind)
        own = copied(tensor) if copies else tensor
        return [came[peer][0] if peer in came else own for peer in group]

    def tell(self, numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
        """Numbers of the host, this rank's and those of the others, as many of each; in the order of `group`."""
        if len(group) == 1:
            return [tuple(numbers)]
        told = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return [tuple(one.tolist()) for one in self.all_gather(told, group)]

    def barrier(self, group: Group) -> None:
        """Wait until every member has come here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device), group, kind="barrier")

    @abstractmethod
    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Send tensors to one rank, itself perhaps, under a tag of its own; does not wait for it to take them."""

    @abstractmethod
    def take(self, peer: int, tag: str, expects: Sequence[Expected]) -> list[Tensor]:
        """What a rank posts under a tag; waits until it has come."""

    def open(self, groups: Collection[Group]) -> None:
        """Make the ways between the members of these groups, where a call would make them otherwise. All ranks call
        this together, each with groups that it is in."""
        return

    def open_mail(self) -> None:
        """Make the ways of messages, which all ranks of the job do together, where some of them may have none."""
        return

    def meet(self, pairs: Collection[tuple[int, int]]) -> None:
        """Make the ways of messages between these ranks, from the first of a pair to the second, where each pair needs
        one. All ranks that are named call this together, with the same pairs."""
        return

    # Several tensors at once, while the rank computes.

    def start_all_to_all(
        self, sends: Sends, expects: Expects, group: Group, kind: str = "all_to_all"
    ) -> Handle[dict[int, list[Tensor]]]:
        """Begin an `all_to_all`: what is sent stays as it is until it has been waited for."""
        return Done(self.all_to_all(sends, expects, group, kind))

    def start_all_reduce(self, parts: Sequence[Tensor], group: Group) -> Handle[Tensor]:
        """Begin the sum of parts laid end to end, of one dtype. A part that is alone in its memory may be written to;
        they are not looked at again if they are copied."""
        return Done(self.all_reduce(torch.cat([part.detach().reshape(-1) for part in parts]), group))

    def start_all_gather(
        self, shards: Sequence[Tensor], sharding: Sharding, group: Group, full: Sequence[Tensor] | None = None
    ) -> Handle[list[Tensor]]:
        """Begin to put wholes together from the members' shards; these stay as they are until it has ended.

        Args:
            shards: this rank's, each as a flat tensor.
            full: where to.
        """
        made = self.wholes(sharding) if full is None else list(full)
        sends = [shards[at] for at, _, _ in sharding.runs[group.index(self.rank)]]
        flat = [[((math.prod(shape),), sharding.dtype) for _, _, shape in runs] for runs in sharding.runs]
        expects = {peer: each for peer, each in zip(group, flat, strict=True) if peer != self.rank}
        arriving = self.start_all_to_all(dict.fromkeys(expects, sends), expects, group, "all_gather")
        return Then(arriving, lambda came: self._fill_in(made, sharding, group, {**came, self.rank: sends}))

    def start_reduce_scatter(self, full: Sequence[Tensor], sharding: Sharding, group: Group) -> Handle[list[Tensor]]:
        """Begin this rank's part of the sums, in group order, of the members' wholes: a shard of each."""
        shards = self.shards(sharding)
        cut = {
            peer: [take(full[number], part) for number, part, _ in sharding.runs[at]] for at, peer in enumerate(group)
        }
        own, mine = cut.pop(self.rank), group.index(self.rank)
        expects = {peer: [(shape, sharding.dtype) for _, _, shape in sharding.runs[mine]] for peer in cut}
        arriving = self.start_all_to_all(cut, expects, group, "reduce_scatter")
        return Then(arriving, lambda came: self._add_up(shards, sharding, group, {**came, self.rank: own}))

    def wholes(self, sharding: Sharding) -> list[Tensor]:
        """Memory for tensors, each of which may soon be let go."""
        each = zip(sharding.lengths, sharding.shapes, strict=True)
        return [self.empty(length, sharding.dtype, brief=True).view(shape) for length, shape in each]

    def shards(self, sharding: Sharding) -> list[Tensor]:
        """Memory for this rank's shards, one after the other."""
        lengths = sharding.shard_lengths
        return as_shards(self.empty(sum(lengths), sharding.dtype), sharding)

    def buffer(self, numel: int, dtype: torch.dtype, group: Group, *, brief: bool = False) -> Tensor:
        """A flat tensor with any content, which members' calls use as it lies. `brief`: it is soon let go."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty(self, numel: int, dtype: torch.dtype, *, brief: bool = False) -> Tensor:
        """A flat tensor with any content, for a result: memory that an earlier one has left, perhaps."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def lay(self, tensors: Sequence[Tensor], group: Group) -> None:
        """Let tensors lie where members' calls use them as they lie, if there is such memory: their `data` moves."""
        return

    @torch.no_grad()
    def _fill_in(self, full: list[Tensor], sharding: Sharding, group: Group, came: Sends) -> list[Tensor]:
        for peer, runs in zip(group, sharding.runs, strict=True):
            for (at, part, shape), shard in zip(runs, came[peer], strict=True):
                put_shard(full[at], part, shard.view(shape))
        return full

    @torch.no_grad()
    def _add_up(self, shards: list[Tensor], sharding: Sharding, group: Group, came: Sends) -> list[Tensor]:
        addends = zip(*(came[peer] for peer in group), strict=True)
        for (at, _, _), each in zip(sharding.runs[group.index(self.rank)], addends, strict=True):
            combine(each, "sum", shards[at])
        return shards

    # What it is a part of.

    @property
    def job(self) -> Transport:
        """The transport of all ranks."""
        return self

    @property
    def num_replicas(self) -> int:
        """How many replicas of the program run: their gradients are averaged."""
        return 1

    @property
    def twins(self) -> Group:
        """The ranks of the job that hold what this one holds, one per replica."""
        return (self.rank,)

    def everywhere(self, group: Group) -> Group:
        """The ranks of a group in all replicas, as ranks of the job."""
        return group

    def progress(self, reference: int) -> Began:
        """Of a further module: what is to be told of its training, and is compared with what that rank tells."""
        return lambda made: None

    def passed(self, update: int) -> None:
        """The rank makes its so many-th update, and has nothing to say that others are to compare."""
        return

    def compared(self, update: int, mine: float, group: Group) -> dict[int, float | None]:
        """The numbers that members give before an update, or None of one that makes it without giving any."""
        number = torch.tensor([mine], dtype=torch.float64, device=self.device)
        return {rank: float(one) for rank, one in zip(group, self.all_gather(number, group), strict=True)}

    def fail(self, error: BaseException) -> Any:
        """Tell all ranks that this one failed, and how."""
        return None

    def raised(self, error: Exception) -> None:
        """An error leaves a call that all ranks make. Comes back when every rank has raised one there, so that they may
        go on alike, or after telling the others, whose waits for this rank end."""
        return

    def begin_step(self, step: int, *, check: bool | None = None) -> bool:
        """From now on messages name this step; `check`: whether members are to make sure that they mean the same.

        Returns:
            whether they do.
        """
        return False


def as_shards(flat: Tensor, sharding: Sharding) -> list[Tensor]:
    """A flat tensor as this rank's shards, which are no views in autograd's sense: they become gradients."""
    each = zip(torch.unsafe_split_with_sizes(flat, sharding.shard_lengths), sharding.mine, strict=True)
    return [piece if len(shape) == 1 else torch.ops.aten._unsafe_view(piece, shape) for piece, shape in each]


def put_shard(full: Tensor, part: Index, shard: Tensor) -> None:
    """Put a shard in its place, unless it lies there."""
    view = narrowed(full, part)
    if view is None or view.data_ptr() != shard.data_ptr() or _steps(view) != _steps(shard):
        put(full, part, shard)


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dims that have any steps."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


COMBINE: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(tensors: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """Combine in order, into new memory or into `out`, which may be the first tensor or, of two, the second."""
    function = COMBINE[op]
    if len(tensors) == 1:
        return tensors[0].clone() if out is None else out.copy_(tensors[0])
    total = function(tensors[0], tensors[1], out=torch.empty_like(tensors[0]) if out is None else out)
    for tensor in tensors[2:]:
        function(total, tensor, out=total)
    return total


def copied(tensor: Tensor) -> Tensor:
    """The same content in memory of its own, in order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class GroupComm:
    """The communicator of some ranks, as algorithms see it (`comm.Comm`): positions instead of ranks."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        assert transport.rank in ranks, f"rank {transport.rank} is not in the group {ranks}"
        assert len(set(ranks)) == len(ranks), f"a rank stands twice in the group {ranks}: it cannot talk to itself"
        self._transport, self._ranks = transport, ranks
        self.rank, self.size = ranks.index(transport.rank), len(ranks)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        if self.size == 1:
            return copied(tensor)
        self._tell("all_reduce")
        return self._transport.all_reduce(tensor, self._ranks, op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Shapes may differ: sizes are exchanged first, so that the transport knows what to expect."""
        if self.size == 1:
            return [copied(tensor)]
        self._tell("all_gather")
        shapes = [tuple(map(int, found)) for found in self._transport.tell(tensor.shape, self._ranks)]
        return self._transport.all_gather(tensor, self._ranks, shapes=shapes)

    def _tell(self, what: str) -> None:
        place = place_here()
        if place:
            # in backward it is not known
            self._transport.doing = Doing(what, place)
