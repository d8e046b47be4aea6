"""Pipeline: one rank's share of a model in pieces, run event by event.

In: a module for each piece that this rank runs (each made for its team's ranks alone), what crosses between pieces, and
the rank's events. Out: after a step the losses of all micro-batches, on every rank, and complete gradients.

A piece runs on tensors that are detached from whatever made them: its backward is started with the gradients that its
readers send back, and ends in gradients of what it took, which go to those who gave; the gradients of its weights are
worked out after that, if they can be (`grad_accumulation.py`). What one rank sends another does not wait to be taken;
what it needs it waits for under a tag that says which tensor of which micro-batch, so whatever order of events has no
circle (`order/check.py`) ends. Gradients of parameters are added up over the micro-batches, in the order of their
backwards, and completed after the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.runtime.layout.execute import execute, real_dtype
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing, Transport
from weft.runtime.program.lines import span
from weft.runtime.program.module import ParallelModule
from weft.runtime.random import Stream
from weft.runtime.training.reduction import times
from weft.runtime.training.stage_io import Crossing, Readers, StageIO
from weft.runtime.weights.grad_accumulation import Queue, accumulating, add_queued
from weft.runtime.weights.gradient import Gradient, give_gradient
from weft.runtime.weights.unsharded import as_edge

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
class Returned:
    """A tensor that evaluation gives back, and how it comes to this rank, whole."""

    tensor: str
    dtype: torch.dtype
    moves: Transfer | None


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
class _Saved:
    """What a forward leaves for its backward: the graph holds what it needs of the tensors, nobody else does."""

    taken: dict[str, Gradient]
    """Where the gradients of what it took arrive."""
    given: dict[str, GradientEdge]
    queue: Queue | None
    """Weight gradients that wait for their own event, or until those of what was taken are on their way."""


@dataclass(frozen=True)
class Share:
    """What this rank runs of micro-batches of one size: its pieces, in the order of the pipeline, and what crosses.

    `returns`: what evaluation gives back. `pairs`: who sends to whom, on all ranks."""

    pieces: Mapping[str, Piece]
    crossings: Sequence[Crossing]
    returns: Sequence[Returned] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def readers(self) -> Readers:
        return Readers.of([one for one in self.crossings if one.target in self.pieces])

    @property
    def modules(self) -> Iterator[ParallelModule]:
        return (piece.module for piece in self.pieces.values())


@dataclass
class Rank:
    """One rank of a pipeline.

    Args:
        sizes: a Share for each size of micro-batches; all hold the very same parameters. More may be added.
        transport: of all ranks of the replica.
        loss: the tensor that is the loss, and the rank that tells it.
        pairs: who sends to whom, on all ranks, beside what the shares say.
    """

    sizes: list[Share]
    ties: Sequence[Tie]
    events: Sequence[Event]
    transport: Transport
    loss: tuple[str, int]
    loss_dtype: torch.dtype = torch.float32
    is_left: bool = False
    """An error has left a step, or an evaluation, in the middle: what was sent for it may lie around still."""
    pairs: frozenset[tuple[int, int]] = frozenset()
    _many: bool = False
    """Gradients of several micro-batches are added up."""
    _saved: dict[tuple[str, int], _Saved] = field(default_factory=dict)
    _queues: dict[tuple[str, int], Queue] = field(default_factory=dict)
    _losses: dict[int, Tensor] = field(default_factory=dict)
    _returned: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """What pieces of this rank have made of what evaluation gives back."""

    @cached_property
    def _mail(self) -> StageIO:
        return StageIO(self.transport)

    @cached_property
    def _divided(self) -> frozenset[tuple[str, int]]:
        """Pieces and micro-batches whose weight gradients have an event of their own."""
        return frozenset((event.piece, event.micro) for event in self.events if event.phase == W)

    @property
    def all_pairs(self) -> frozenset[tuple[int, int]]:
        """Who sends to whom, at any size."""
        return self.pairs.union(*(share.pairs for share in self.sizes))

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
        scale: float | Tensor = 1.0,
        size_of: Sequence[int] | None = None,
        first: int = 0,
        completes: Collection[int] = (),
    ) -> list[Tensor]:
        """Run all events of a step.

        Args:
            batches: the inputs of each micro-batch. If they are fewer than the schedule has, the events of the others
                are left out: the same on all ranks of a replica, so that nobody waits for them.
            shares: what each micro-batch's loss counts in that of the step. scale: of all gradients.
            size_of: which of `sizes` each micro-batch has; the first if not given.
            first: the number of the first micro-batch among those of all replicas.
            completes: sizes whose gradients other replicas complete in this step, whether they come up here or not.

        Returns:
            the losses of the micro-batches.
        """
        sizes, self.is_left = [0] * len(batches) if size_of is None else size_of, True
        self._begin(sizes, starts=not completes)
        if completes:
            # replicas run different events: one without a micro-batch sends nothing
            self.transport.open_mail()
        for event, share, piece in self._running(sizes):
            if event.phase == F:
                piece.module.stream = Stream(seed, step, first + event.micro)
            with span(event):
                self.run_event(event, share, piece, batches[event.micro], shares[event.micro], scale)
        self._complete(completes)
        self._tie()
        losses = self._tell_losses(len(batches))
        self.is_left = False
        return losses

    def run_event(
        self, event: Event, share: Share, piece: Piece, batch: Sequence[Tensor], counts: float, scale: float | Tensor
    ) -> None:
        """Run one event of a step. Whoever records a step runs some of them only (`weft/simulate/repeat.py`).

        Args:
            counts: what the micro-batch's loss counts in that of the step.
        """
        if event.phase == F:
            self._forward(share, piece, event.micro, batch)
            return
        piece.module.of_others = False
        if event.phase == B:
            self._backward(share, piece, event.micro, counts, scale)
        else:
            add_queued(self._queues.pop((event.piece, event.micro)))
        piece.module.of_others = len(self.sizes) > 1

    @torch.no_grad()
    def forward(
        self, batches: Sequence[Sequence[Tensor]], stream: Stream, *, size_of: Sequence[int]
    ) -> list[list[Tensor]]:
        """Run the forwards of all micro-batches, without gradient.

        Args:
            stream: of the first micro-batch.

        Returns:
            what the model returns of each micro-batch, whole.
        """
        self.is_left, self._returned = True, {}
        self._meet()
        for event, share, piece in self._running(size_of):
            piece.module.stream = replace(stream, microbatch=stream.microbatch + event.micro)
            with span(event):
                self._forward(share, piece, event.micro, batches[event.micro])
        everybody = tuple(range(self.transport.num_ranks))
        found = []
        for micro, number in enumerate(size_of):
            whole = []
            for one in self.sizes[number].returns:
                assert one.moves is not None, f"{one.tensor} does not come to this rank"
                self.transport.doing = Doing(f"{one.tensor} of micro-batch {micro}, which the model returns")
                moves, made = replace(one.moves, group=everybody), self._returned.pop((one.tensor, micro), None)
                whole += execute(moves, [] if made is None else [made], self.transport, dtype=one.dtype)
            found.append(whole)
        self.is_left = False
        return found

    def _begin(self, size_of: Sequence[int], *, starts: bool) -> None:
        """A step begins; `starts`: sums of gradients may start when the last backward has brought its share."""
        self._saved, self._losses, self._queues = {}, {}, {}
        self._many = len(size_of) > 1
        self._meet()
        backwards = Counter((e.piece, size_of[e.micro]) for e in self._real(len(size_of)) if e.phase == B)
        for number, share in enumerate(self.sizes):
            for piece in share.pieces.values():
                piece.module.hold_gradients(nullcontext())
                # a gradient is completed as the size of its micro-batch asks for
                piece.module.of_others = len(self.sizes) > 1
                piece.module.grad_sync.expect(backwards[piece.name, number] if starts else 0)

    def _meet(self) -> None:
        """Messages of a step begin."""
        self.transport.meet(self.all_pairs)
        self._mail.begin()

    def _real(self, count: int) -> Iterator[Event]:
        """The events of the first so many micro-batches."""
        return (event for event in self.events if event.micro < count)

    def _complete(self, anyway: Collection[int]) -> None:
        """Complete the gradients of all sizes, and add them up; `anyway`: also where none came."""
        for name in self.sizes[0].pieces:
            self.transport.doing = Doing(f"gradients of {name}")
            found: dict[str, Tensor] = {}
            for number, share in enumerate(self.sizes):
                module = share.pieces[name].module
                module.complete_gradients(anyway=number in anyway)
                for parameter, held in module.trained():
                    if held.grad is not None:
                        known = found.get(parameter)
                        found[parameter] = held.grad if known is None else known.add_(held.grad)
                        held.grad = None
            for parameter, held in self.sizes[0].pieces[name].module.trained():
                held.grad = found.get(parameter)

    def _running(self, size_of: Sequence[int]) -> Iterator[tuple[Event, Share, Piece]]:
        """The same, each with its piece, as they are run."""
        for event in self._real(len(size_of)):
            self.transport.doing = Doing(str(event))
            share = self.sizes[size_of[event.micro]]
            yield event, share, share.pieces[event.piece]

    def _forward(self, share: Share, piece: Piece, micro: int, batch: Sequence[Tensor]) -> None:
        taken: dict[str, Tensor] = {}
        sinks: dict[str, Gradient] = {}
        for one in share.crossings:
            if one.target == piece.name:
                tensor = self._mail.receive(one, micro, share.readers)
                if one.trained and torch.is_grad_enabled():
                    sink = sinks[one.tensor] = Gradient()
                    tensor = as_edge(tensor.detach(), piece.module.anchor, sink)
                taken[one.tensor] = tensor
        queue = Queue() if (piece.name, micro) in self._divided or (sinks and self._many) else None
        with self._mode(piece, queue):
            found = piece.module(*(batch[at] for at in piece.inputs), *(taken[name] for name in piece.takes))
        self._tell_buffers(share, piece)
        results = (found,) if isinstance(found, Tensor) else found
        given = {name: result for (name, _), result in zip(piece.gives, results, strict=True)}
        for one in share.crossings:
            if one.source == piece.name:
                self._mail.send(one, micro, given[one.tensor])
        for back in share.returns:
            if back.tensor in given:
                self._returned[back.tensor, micro] = given[back.tensor]
        if not torch.is_grad_enabled():
            return
        if self.loss[0] in given:
            self._losses[micro] = given[self.loss[0]].detach()
        trained = [name for name, trained in piece.gives if trained]
        if trained:
            # what was frozen since the program was made, with all before it, has no gradient
            roots = {name: get_gradient_edge(given[name]) for name in trained if given[name].requires_grad}
            self._saved[piece.name, micro] = _Saved(sinks, roots, queue)

    def _mode(self, piece: Piece, queue: Queue | None) -> AbstractContextManager[Any]:
        """What a piece runs under: its weight gradients are added up, or queued."""
        return accumulating(piece.module, queue) if self._many or queue is not None else nullcontext()

    def _tell_buffers(self, share: Share, piece: Piece) -> None:
        """What a forward made of the piece's buffers is what the next one reads, whatever its size."""
        for other in self.sizes:
            if other is not share:
                other.pieces[piece.name].module.take_buffers(piece.module)

    def _backward(self, share: Share, piece: Piece, micro: int, counts: float, scale: float | Tensor) -> None:
        held = self._saved.pop((piece.name, micro))
        gradients: dict[str, Gradient] = {}
        for one in share.crossings:
            if one.source == piece.name and one.trained and one.back == (one.tensor, one.target):
                gradients.setdefault(one.tensor, Gradient()).add(self._mail.receive_back(one, micro))
        if self.loss[0] in held.given:
            loss = self._losses[micro]
            gradients[self.loss[0]] = Gradient(times(torch.full_like(loss, counts), scale).to(loss.dtype))
        # what is run again in backward queues, or adds up, too
        piece.module.rerun_mode = self._mode(piece, held.queue)
        _run_backward(held.given, gradients)
        for one in share.crossings:
            if one.target == piece.name and one.trained:
                self._mail.send_back(one, micro, held.taken[one.tensor].total, share.readers)
        if held.queue is not None:
            if (piece.name, micro) in self._divided:
                self._queues[piece.name, micro] = held.queue
            else:
                add_queued(held.queue)

    def _tie(self) -> None:
        """Each holder of a shared parameter gets the sum of all holders' gradients, added in one order."""
        for tie in self.ties:
            self.transport.doing = Doing(f"gradient of {tie.parameter}")
            pieces = self.sizes[0].pieces
            modules = {at: pieces[name].module for at, name in enumerate(tie.holders) if name in pieces}
            # a parameter that lies whole on one device of a piece is not on the others
            found = {at: module.part(tie.parameter) for at, module in modules.items()}
            held = {at: part for at, part in found.items() if part is not None}
            sent = {at: modules[at].sums.sent(part.dtype) for at, part in held.items()}
            for at, part in held.items():
                for into, moves in enumerate(tie.moves):
                    transfer = moves[at]
                    if transfer is not None and transfer.sends:
                        self._mail.post(transfer, _tied(tie, at, into), _taken(part, sent[at]))
            for into, part in held.items():
                total: Tensor | None = None
                for at, transfer in enumerate(tie.moves[into]):
                    assert transfer is not None
                    came = self._mail.take(transfer, _tied(tie, at, into), sent[into])
                    total = came if total is None else total + came
                if part.requires_grad:
                    # others may wait for what is here of one that was frozen since
                    give_gradient(part, total)

    def _tell_losses(self, count: int) -> list[Tensor]:
        tensor, teller = self.loss
        if not count:
            return []
        self.transport.doing = Doing(f"losses of a step, {tensor}")
        # one way for all of them: a message to each of many ranks needs as many
        if self.transport.rank == teller:
            mine = torch.stack([self._losses[micro] for micro in range(count)])
        else:
            mine = torch.zeros(count, dtype=real_dtype(self.loss_dtype), device=self.transport.device)
        return list(self.transport.all_reduce(mine, tuple(range(self.transport.num_ranks))))


def _taken(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a parameter; zeros if none came."""
    return torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad.to(dtype)


def _tied(tie: Tie, at: int, into: int) -> str:
    return f"gradient of {tie.parameter} from {tie.holders[at]} for {tie.holders[into]}"


def _run_backward(given: Mapping[str, GradientEdge], gradients: Mapping[str, Gradient]) -> None:
    """Backward of a piece from what it gave; autograd makes zeros where a gradient did not come."""
    if not given:
        return
    found = {name: gradients[name].total for name in given if name in gradients}
    roots = [(given[name], gradient) for name, gradient in found.items() if gradient is not None]
    if not roots:
        # nobody asked, and yet what the piece does in backward with others, it does on all of its ranks
        edge = next(iter(given.values()))
        (meta,) = edge.node._input_metadata[edge.output_nr : edge.output_nr + 1]
        roots = [(edge, torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device))]
    torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
