"""Pipeline: one rank's share of a model in pieces, run event by event.

In: a module for each piece that this rank runs (each made for its team's ranks alone), what crosses between pieces, and
the rank's events. Out: after a step the losses of all micro-batches, on every rank, and complete gradients.

A piece runs on tensors that are detached from whatever made them: its backward is started with the gradients that its
readers send back, and ends in gradients of what it took, which go to those who gave. What one rank sends another does
not wait to be taken; what it needs it waits for under a tag that says which tensor of which micro-batch, so whatever
order of events has no circle (`order/check.py`) ends. Gradients of parameters are added up over the micro-batches, in
the order of their backwards, and completed after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.runtime.deferred import Deferred
from weft.runtime.module import ParallelModule
from weft.runtime.parallel import give_back
from weft.runtime.random import Stream
from weft.runtime.script import Transfer
from weft.runtime.transfers import assembled, real_dtype, size, take
from weft.runtime.transport import Doing, Transport

F, B, W = "fbw"


@dataclass(frozen=True)
class Event:
    """One phase of a piece for one micro-batch."""

    phase: str
    piece: str
    micro: int

    def __str__(self) -> str:
        return f"{self.phase.upper()}{self.micro} of {self.piece}"


@dataclass(frozen=True)
class Crossing:
    """A tensor that one piece gives and another takes, as this rank sees it: None where it has no part in it."""

    tensor: str
    source: str
    target: str
    dtype: torch.dtype
    forward: Transfer | None
    backward: Transfer | None
    """None too if no gradient flows."""
    trained: bool

    def tag(self, way: str, micro: int) -> str:
        return f"{'gradient of ' if way == B else ''}{self.tensor} for {self.target}, micro-batch {micro}"


@dataclass(frozen=True)
class Tie:
    """A parameter that several pieces hold. For each holder that is here, how the others' gradients come to it."""

    parameter: str
    holders: tuple[str, ...]
    moves: tuple[tuple[Transfer | None, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A piece that this rank runs.

    Args:
        inputs: positions among the model's inputs of those that it reads, which come first among its arguments.
        takes: tensors that come after them; gives: tensors that it returns, and whether each has a gradient.
    """

    name: str
    module: ParallelModule
    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    gives: tuple[tuple[str, bool], ...]


@dataclass
class _Held:
    """What a forward leaves for its backward."""

    taken: dict[str, Tensor]
    given: dict[str, Tensor]
    queue: Deferred | None
    """Weight gradients that wait for their own event."""


@dataclass(frozen=True)
class _Weights:
    """A module whose gradients the pipeline completes, as a queue of weight gradients sees it."""

    module: ParallelModule

    def hold_gradients(self, mode: AbstractContextManager[Any]) -> None:
        return None

    def complete_gradients(self) -> None:
        return None

    def is_weight(self, tensor: Tensor) -> bool:
        return self.module.is_weight(tensor)


@dataclass(frozen=True)
class Share:
    """What this rank runs of micro-batches of one size: its pieces, in the order of the pipeline, and what crosses."""

    pieces: Mapping[str, Piece]
    crossings: Sequence[Crossing]

    @property
    def modules(self) -> Iterator[ParallelModule]:
        return (piece.module for piece in self.pieces.values())


@dataclass
class Rank:
    """One rank of a pipeline.

    Args:
        sizes: a Share for each size of micro-batches; all hold the very same parameters.
        transport: of all ranks of the replica.
        loss: the tensor that is the loss, and the rank that tells it.
    """

    sizes: Sequence[Share]
    ties: Sequence[Tie]
    events: Sequence[Event]
    transport: Transport
    loss: tuple[str, int]
    loss_dtype: torch.dtype = torch.float32
    _held: dict[tuple[str, int], _Held] = field(default_factory=dict)
    _queues: dict[tuple[str, int], Deferred] = field(default_factory=dict)
    _losses: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def _divided(self) -> frozenset[tuple[str, int]]:
        """Pieces and micro-batches whose weight gradients have an event of their own."""
        return frozenset((event.piece, event.micro) for event in self.events if event.phase == W)

    @property
    def modules(self) -> Iterator[ParallelModule]:
        """The modules that hold the rank's parameters, in the order of the pipeline."""
        return self.sizes[0].modules

    def step(
        self,
        batches: Sequence[Sequence[Tensor]],
        shares: Sequence[float],
        seed: int,
        step: int,
        *,
        size_of: Sequence[int] | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        """Run all events of a step.

        Args:
            batches: the inputs of each micro-batch.
            shares: what each micro-batch's loss counts in that of the step.
            size_of: which of `sizes` each micro-batch has; the first if not given.
            first: the number of the first micro-batch among those of all replicas.

        Returns:
            the losses of the micro-batches.
        """
        self._held, self._losses, self._queues = {}, {}, {}
        for module in (module for share in self.sizes for module in share.modules):
            module.hold_gradients(nullcontext())
        for event in self.events:
            self.transport.doing = Doing(str(event))
            share = self.sizes[size_of[event.micro] if size_of is not None else 0]
            piece = share.pieces[event.piece]
            if event.phase == F:
                piece.module.stream = Stream(seed, step, first + event.micro)
                self._forward(share, piece, event.micro, batches[event.micro])
            elif event.phase == B:
                self._backward(share, piece, event.micro, shares[event.micro])
            else:
                self._queues.pop((event.piece, event.micro)).run()
        self._complete()
        self._tie()
        return self._tell_losses(len(batches))

    def _complete(self) -> None:
        """Complete the gradients of all sizes, and add them up."""
        for name in self.sizes[0].pieces:
            self.transport.doing = Doing(f"gradients of {name}")
            found: dict[str, Tensor] = {}
            for share in self.sizes:
                module = share.pieces[name].module
                module.complete_gradients()
                for parameter, held in module.trained():
                    if held.grad is not None:
                        known = found.get(parameter)
                        found[parameter] = held.grad if known is None else known.add_(held.grad)
                        held.grad = None
            for parameter, held in self.sizes[0].pieces[name].module.trained():
                held.grad = found.get(parameter)

    def _forward(self, share: Share, piece: Piece, micro: int, batch: Sequence[Tensor]) -> None:
        taken = {
            one.tensor: self._receive(one, F, micro).requires_grad_(one.trained and torch.is_grad_enabled())
            for one in share.crossings
            if one.target == piece.name
        }
        queue = Deferred(_Weights(piece.module)) if (piece.name, micro) in self._divided else None
        with queue or nullcontext():
            found = piece.module(*(batch[at] for at in piece.inputs), *(taken[name] for name in piece.takes))
        self._tell_buffers(share, piece)
        results = (found,) if isinstance(found, Tensor) else found
        given = {name: result for (name, _), result in zip(piece.gives, results, strict=True)}
        for one in share.crossings:
            if one.source == piece.name:
                self._send(one, F, micro, given[one.tensor])
        if self.loss[0] in given:
            self._losses[micro] = given[self.loss[0]].detach()
        if any(trained for _, trained in piece.gives):
            self._held[piece.name, micro] = _Held(taken, given, queue)

    def _tell_buffers(self, share: Share, piece: Piece) -> None:
        """What a forward made of the piece's buffers is what the next one reads, whatever its size."""
        for other in self.sizes:
            if other is not share:
                give_back(piece.module, other.pieces[piece.name].module)

    def _backward(self, share: Share, piece: Piece, micro: int, counts: float) -> None:
        held = self._held.pop((piece.name, micro))
        gradients: dict[str, Tensor] = {}
        for one in share.crossings:
            if one.source == piece.name and one.trained:
                came = self._receive(one, B, micro)
                gradients[one.tensor] = gradients[one.tensor] + came if one.tensor in gradients else came
        if self.loss[0] in held.given:
            gradients[self.loss[0]] = torch.full_like(held.given[self.loss[0]], counts)
        roots = [(held.given[name], name) for name, trained in piece.gives if trained]
        # what is run again in backward defers too
        piece.module.rerun_mode = held.queue or nullcontext()
        torch.autograd.backward(
            [root for root, _ in roots],
            [gradients[name] if name in gradients else torch.zeros_like(root) for root, name in roots],
        )
        if held.queue is not None:
            self._queues[piece.name, micro] = held.queue
        for one in share.crossings:
            if one.target == piece.name and one.trained:
                tensor = held.taken[one.tensor]
                self._send(one, B, micro, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def _send(self, crossing: Crossing, way: str, micro: int, tensor: Tensor) -> None:
        transfer = crossing.forward if way == F else crossing.backward
        assert transfer is not None, f"{crossing.tensor} does not leave this rank"
        self._post(transfer, crossing.tag(way, micro), tensor)

    def _receive(self, crossing: Crossing, way: str, micro: int) -> Tensor:
        transfer = crossing.forward if way == F else crossing.backward
        assert transfer is not None, f"{crossing.tensor} does not come to this rank"
        return self._take(transfer, crossing.tag(way, micro), crossing.dtype)

    def _post(self, transfer: Transfer, tag: str, tensor: Tensor) -> None:
        by_peer: dict[int, list[Tensor]] = {}
        for piece in transfer.sends:
            by_peer.setdefault(piece.peer, []).append(take(tensor.detach(), piece.index))
        for peer, tensors in by_peer.items():
            self.transport.post(peer, tag, tensors)

    def _take(self, transfer: Transfer, tag: str, dtype: torch.dtype) -> Tensor:
        expects: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for piece in transfer.receives:
            expects.setdefault(piece.peer, []).append((size(piece.index), real_dtype(dtype)))
        came = {peer: iter(self.transport.take(peer, tag, shapes)) for peer, shapes in expects.items()}
        pieces = [next(came[piece.peer]) for piece in transfer.receives]
        (found,) = assembled(transfer, pieces, dtype, self.transport.device)
        return found

    def _tie(self) -> None:
        """Each holder of a shared parameter gets the sum of all holders' gradients, added in one order."""
        for tie in self.ties:
            self.transport.doing = Doing(f"gradient of {tie.parameter}")
            pieces = self.sizes[0].pieces
            here = [at for at, name in enumerate(tie.holders) if name in pieces]
            held = {at: pieces[tie.holders[at]].module.part(tie.parameter) for at in here}
            for at in here:
                for into, moves in enumerate(tie.moves):
                    transfer = moves[at]
                    if transfer is not None and transfer.sends:
                        self._post(transfer, _tied(tie, at, into), _taken(held[at]))
            for into in here:
                total: Tensor | None = None
                for at, transfer in enumerate(tie.moves[into]):
                    assert transfer is not None
                    came = self._take(transfer, _tied(tie, at, into), held[into].dtype)
                    total = came if total is None else total + came
                held[into].grad = total

    def _tell_losses(self, count: int) -> list[Tensor]:
        tensor, teller = self.loss
        tag = f"losses of a step, {tensor}"
        if self.transport.rank == teller:
            mine = torch.stack([self._losses[micro] for micro in range(count)])
            for peer in range(self.transport.num_ranks):
                if peer != teller:
                    self.transport.post(peer, tag, [mine])
            return list(mine)
        dtype = real_dtype(self.loss_dtype)
        return list(self.transport.take(teller, tag, [((count,), dtype)])[0])


def _taken(parameter: Tensor) -> Tensor:
    """The gradient of a parameter; zeros if none came."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _tied(tie: Tie, at: int, into: int) -> str:
    return f"gradient of {tie.parameter} from {tie.holders[at]} for {tie.holders[into]}"
