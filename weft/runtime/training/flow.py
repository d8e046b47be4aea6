"""Flow: a program, and the batches that go through it.

In: a rank's pieces and what is written about their batches. Out: a batch in micro-batches, with the size that each has
among those that the program knows; what forwards gave, joined again. A batch of fewer rows than the schedule has
micro-batches is cut into as many as it has rows. A program of one piece that runs all of the batch at once
(`is_whole`) may be called itself: its results are roots of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.links.replicas import Replica
from weft.runtime.program.batch import BatchMismatch, Form, OtherForm
from weft.runtime.program.calling import Arguments
from weft.runtime.program.files import Source, files_of
from weft.runtime.program.module import ParallelModule
from weft.runtime.program.returns import Returns
from weft.runtime.program.stored import in_order
from weft.runtime.program.surface import Modes
from weft.runtime.training.load import load_pipeline, pipeline_parts
from weft.runtime.training.microbatches import BatchDim, dims_of, part_sizes, rows_of, split_arguments
from weft.runtime.training.pieces import Pieces
from weft.runtime.training.pipeline import Rank, Share
from weft.runtime.training.reduction import reduced
from weft.runtime.weights.masters import Masters, masters_of, tell_sums
from weft.runtime.weights.precision import Mixed

LOSS = -1
"""In place of a dim along which parts are laid end to end: they are weighed and added up."""


@dataclass(frozen=True, eq=False)
class Flow:
    """One program.

    Args:
        dims: the batch dim of each input.
        count: micro-batches of a step, at most.
        known: which of the rank's sizes micro-batches of so many rows have.
        joins: for each tensor that a forward returns, the dim along which micro-batches are joined, or LOSS.
        output: the form of what a forward returns; None if it is the loss alone.
        returned: what the original returns: "loss", "more" than that, or "none".
        batch: of other arguments than the example's, for which the program was made.
        is_whole: it is one piece, and the batch is not cut.
        needs_grad: of such a program, for each input whether its gradient goes back to the caller.
    """

    rank: Rank
    form: Form
    dims: tuple[BatchDim, ...] = ()
    count: int = 1
    known: dict[int, int] = field(default_factory=dict)
    joins: tuple[int, ...] = ()
    output: Returns | None = None
    returned: str = "loss"
    batch: Arguments | None = field(default=None, compare=False)
    is_whole: bool = False
    needs_grad: tuple[bool, ...] = ()

    @property
    def gives_all(self) -> bool:
        """True if it returns what the original does."""
        return self.output is not None or self.returned != "more"

    @property
    def gives_loss(self) -> bool:
        """True if it returns the loss alone, or there is none."""
        return self.output is None or self.returned == "none"

    @property
    def has_loss(self) -> bool:
        """True if a loss is among what it returns."""
        return self.output is None or self.returned != "none"

    @property
    def program(self) -> ParallelModule:
        """The only one."""
        (module,) = self.modules
        return module

    @property
    def modules(self) -> list[ParallelModule]:
        """Of all sizes."""
        return [module for share in self.rank.sizes for module in share.modules]

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if the arguments are those of the form, whatever their sizes."""
        try:
            self.form.bind(args, kwargs)
        except BatchMismatch as error:
            return not isinstance(error, OtherForm)
        return True

    def bind_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a batch that is not cut; refuses one that wants a gradient that the program does not give."""
        inputs = self.form.bind(args, kwargs)
        for tensor, given, told in zip(inputs, self.needs_grad, self.form.tensors, strict=False):
            if tensor.requires_grad and not given and torch.is_grad_enabled():
                raise BatchMismatch(
                    f"{told[1]} of the batch requires a gradient, in the example it does not: give parallelize() an "
                    f"example whose {told[1]} does (requires_grad_())"
                )
        return inputs

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a batch, or of a micro-batch; refuses one of another form than the example's."""
        return [tensor.detach() for tensor in self.form.bind(args, kwargs, self.dims)]

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Arguments], int]:
        """The micro-batches of a batch, and its rows."""
        tensors = self.bind(args, kwargs)
        rows = rows_of(tensors, self.dims) if any(dim is not None for dim in self.dims) else 1
        if not rows:
            raise BatchMismatch("the batch has no rows: a replica without a batch in a step gives None")
        ordered = {name: kwargs[name] for name in self.form.keywords if name in kwargs}
        return split_arguments(tuple(args), {**ordered, **kwargs}, self.dims, min(self.count, rows))[0], rows

    def parts(self, rows: int) -> list[int]:
        """The rows of each micro-batch of a batch."""
        return part_sizes(rows, min(self.count, rows)) if rows else []

    def missing(self, rows: Collection[int]) -> list[int]:
        """Sizes of micro-batches of such batches that the program does not know yet."""
        wanted = {part for one in rows for part in self.parts(one)}
        return sorted(wanted - self.known.keys(), reverse=True)

    def add(self, rows: int, shares: Sequence[Share]) -> None:
        """Another size."""
        (share,) = shares
        self.known[rows] = len(self.rank.sizes)
        self.rank.sizes.append(share)

    def size_of(self, rows: int) -> list[int]:
        """The size of each micro-batch of a batch."""
        return [self.known[part] for part in self.parts(rows)]

    def refresh(self) -> None:
        """All sizes have the buffers of the first: others may have replaced them."""
        first = self.rank.sizes[0]
        for share in self.rank.sizes[1:]:
            for name, piece in share.pieces.items():
                piece.module.take_buffers(first.pieces[name].module)

    def join(self, found: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> Any:
        """What the model returns of a batch, from what it returns of its micro-batches."""
        if len(found) == 1:
            whole = list(found[0])
        else:
            columns = zip(*found, strict=True)
            whole = [
                reduced(parts, shares) if dim == LOSS else torch.cat(list(parts), dim)
                for parts, dim in zip(columns, self.joins, strict=True)
            ]
        return whole[0] if self.output is None else self.output.build(tuple(whole))


MakeFlow = Callable[[Arguments | None, Modes, bool], Flow]
"""Makes a program for other modes, those of `eval()`, for the example or for a batch of other arguments; one that
returns all that the original does if that is asked for."""
MakeSize = Callable[[Flow, int, Modes], None]
"""Makes a program serve micro-batches of so many rows."""


def open_flow(source: Source, transport: Replica, batch: Arguments | None = None) -> Flow:
    """The rank's programs, their parts still zeros, and how batches go through them.

    Args:
        batch: of other arguments than the example's, for which the program was made.
    """
    files = files_of(source)
    told, rank = files.about, load_pipeline(files, transport)
    form = Form.from_json(told["batch"])
    output = None if told.get("output") is None else Returns.from_json(told["output"])
    returned = told.get("forward", "loss")
    if files.is_whole:
        needs_grad = tuple(told.get("needs_grad", ()))
        (program,) = rank.modules
        program.inputs_from = {int(at): frozenset(some) for at, some in told.get("reached_from", {}).items()}
        return Flow(rank, form, output=output, returned=returned, is_whole=True, needs_grad=needs_grad)
    shapes = [tuple(int(size) for size in shape) for _, _, shape, _ in form.tensors]
    dims = dims_of(shapes) if told["dims"] is None else told["dims"]
    places = tuple(None if dim is None else dim % len(shape) for dim, shape in zip(dims, shapes, strict=True))
    rows = next((shape[dim] for shape, dim in zip(shapes, places, strict=True) if dim is not None), 1)
    size_of, joins = told["size_of"], told.get("joins", ())
    events = [micro for one in told["events"].values() for _, _, micro in one]
    return Flow(
        rank,
        form,
        places,
        1 if joins is None else max(events) + 1,
        dict(zip(part_sizes(rows, len(size_of)), size_of, strict=True)),
        tuple(joins or ()),
        output,
        returned,
        batch,
    )


def open_trained(
    source: Source, transport: Replica, mixed: Mixed | None, order: Mapping[str, int] | None = None
) -> tuple[Flow, Pieces[ParallelModule], Pieces[Masters] | None]:
    """A program for training: its flow, the rank's pieces, and their masters if they compute in another precision.

    Args:
        order: the place of each name in the original.
    """
    files, order = files_of(source), order or {}
    flow = open_flow(files, transport)
    parts, trained = (
        (flow.program.stored_parts(), flow.program.trained_parts()) if flow.is_whole else pipeline_parts(files)
    )
    pieces = Pieces(tuple(flow.rank.modules), transport, in_order(parts, order), in_order(trained, order), order)
    masters = masters_of(pieces, mixed, at_once=flow.is_whole)
    tell_sums(flow.modules, mixed)
    return flow, pieces, masters


@torch.no_grad()
def lend(pieces: Pieces[ParallelModule], flow: Flow) -> None:
    """Let a program for evaluation read the parameters and buffers that training has."""
    for module in flow.modules:
        for name, index in module.stored.items():
            owner = next((one for one in pieces.modules if one.stored.get(name) == index), None)
            assert owner is not None, f"eval() would store {name} elsewhere than training does"
            held = owner.part(name)
            if isinstance(held, nn.Parameter):
                module.borrow(name, held)
            elif held is not None:
                module.update(name, held)


def take_back(pieces: Pieces[ParallelModule], flow: Flow) -> None:
    """Let training know what forwards of evaluation have made of buffers."""
    for module in flow.rank.modules:
        for owner in pieces.modules:
            owner.take_buffers(module)
