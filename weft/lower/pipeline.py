"""Plan -> Pipelined: a Program for each piece of a model whose ops live on different devices, and what crosses.

In: a Plan. Out: for each piece (segments.py) a Program of its own on its own devices, counted from 0; for each tensor
that one piece makes and another reads a Crossing, forward and backward; for each parameter that several pieces hold a
Tie, or a Loan where a piece only reads it, without gradient, and another on its devices holds it alike. A piece takes a
tensor in the layout in which its first reader wants it (or that of an earlier piece on its devices), and gives one in
the layout in which it was made; sums are complete on both sides. Gradients cross in the same layouts the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.cost.links import Links
from weft.errors import PlanError
from weft.ir.graph import Graph, Input, Tensor
from weft.ir.layout import Axis, Grid, Layout, copied_on
from weft.ir.oplayout import Copied, OpLayout
from weft.ir.program import Move, Program
from weft.lower.build import Builder, Need
from weft.lower.idle import without_idle_gradients
from weft.lower.piece import Lowering
from weft.lower.segments import Piece, pieces
from weft.lower.stored import resting
from weft.plan.follow import resolve
from weft.plan.plan import Plan


@dataclass(frozen=True)
class Part:
    """A piece as a Program on devices 0 .. k - 1, which are `piece.segment.devices`.

    Its inputs are those of the model that it reads, then what it takes; its outputs are what it gives.
    """

    piece: Piece
    program: Program

    def at_home(self, layout: Layout) -> Layout:
        """A layout of the Program on the devices of the job."""
        devices = self.piece.segment.devices
        grid = Grid(layout.grid.axes, tuple(devices[number] for number in layout.grid.devices))
        return replace(layout, grid=grid)


@dataclass(frozen=True)
class Crossing:
    """A tensor on its way from one piece to another, and its gradient on the way back (None: none flows)."""

    tensor: str
    source: str
    target: str
    forward: Move
    backward: Move | None


@dataclass(frozen=True)
class Tie:
    """A trained parameter that several pieces hold: their gradients are added up in this order.

    `moves[i][j]` brings the gradient of holder j to the layout of holder i.
    """

    parameter: str
    holders: tuple[str, ...]
    moves: tuple[tuple[Move, ...], ...]


@dataclass(frozen=True)
class Loan:
    """A parameter that one piece reads without gradient and another holds in the same layout on the same devices."""

    parameter: str
    owner: str
    borrower: str


@dataclass(frozen=True)
class Pipelined:
    """What the devices run for one micro-batch, piece by piece."""

    graph: Graph
    devices: int
    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...]
    ties: tuple[Tie, ...]
    loans: tuple[Loan, ...] = ()


def lower_pieces(plan: Plan, *, links: Links | None = None) -> Pipelined:
    """Turn a plan into pieces."""
    graph, book = without_idle_gradients(plan.graph, "loss"), plan.rules
    layouts, lowering = resolve(plan, book), Lowering.of(plan, links)
    blocks = {name: stage.name for name, stage in plan.stages.items()}
    blocks.update((op, block) for block, ops in plan.blocks.items() for op in ops.names)
    found = pieces(graph, layouts, book, blocks)
    _refuse_divided_buffers(graph, found)
    parts: tuple[Part, ...] = ()
    for piece in found:
        # what another piece on these devices takes comes by the same messages, if this one takes it alike
        near = [part for part in parts if part.piece.segment.devices == piece.segment.devices]
        known = {name: part.program.stored[name] for part in reversed(near) for name in part.piece.takes}
        lowered = _lower_piece(lowering, graph, piece, layouts, known=known, first=not parts)
        parts = (*parts, Part(piece, lowered))
    loans = tuple(_loans(graph, parts))
    return Pipelined(graph, plan.devices, parts, tuple(_crossings(parts)), tuple(_ties(graph, parts, loans)), loans)


def _refuse_divided_buffers(graph: Graph, found: tuple[Piece, ...]) -> None:
    """A buffer that gets new content lives in one piece: nobody else would see it."""
    for buffer in graph.buffers:
        if buffer.update is None:
            continue
        users = [
            (piece, op)
            for piece in found
            for op in piece.ops
            if buffer.tensor in op.inputs or buffer.update in op.outputs
        ]
        names = list(dict.fromkeys(piece.segment.name for piece, _ in users))
        if len(names) > 1:
            raise PlanError(
                f"buffer {buffer.names[0]} is read and written in different stages: {', '.join(names)}",
                place=users[-1][1].place,
                remedy="keep the ops that use it in one stage",
            )


def _lower_piece(
    lowering: Lowering,
    whole: Graph,
    piece: Piece,
    layouts: Mapping[str, OpLayout],
    *,
    known: Mapping[str, Layout],
    first: bool,
) -> Program:
    """`known`: where what the piece takes may be; `first`: it holds what no piece reads."""
    graph = sub_graph(whole, piece, _unread(whole) if first else frozenset())
    here = {op.name: _at_piece(layouts[op.name], piece) for op in piece.ops}
    count = len(piece.segment.devices)
    taken = {
        name: known.get(name) or resting(uses[0].layout) or copied_on(graph.tensors[name].sizes, tuple(range(count)))
        for name, uses in lowering.uses(graph, here, piece.takes).items()
    }
    return lowering.program(
        graph,
        here,
        count,
        lowering.store(graph, here, count, taken),
        entering=[name for name in piece.takes if graph.tensors[name].needs_grad and piece.segment.trains],
        returned=lambda builder: {name: _given(builder, name, graph, count) for name in piece.gives},
        given=True,
    )


def _unread(graph: Graph) -> frozenset[str]:
    """Parameters and buffers that no op reads or makes anew: somebody has to hold them."""
    read = {name for op in graph.ops for name in op.inputs}
    held = {one.tensor for one in graph.parameters}
    held |= {one.tensor for one in graph.buffers if one.update not in graph.producers}
    return frozenset(held - read)


def sub_graph(graph: Graph, piece: Piece, held: frozenset[str] = frozenset()) -> Graph:
    """The part of a Graph that a piece runs: what it takes is among the inputs, what it gives is the output.

    `held`: parameters and buffers that it holds without reading them.
    """
    read = dict.fromkeys((*(name for op in piece.ops for name in op.inputs), *held))
    made = [name for op in piece.ops for name in op.outputs]
    own = [one for one in graph.inputs if one.tensor in read]
    inputs = (*own, *(Input(name, name, len(own) + at) for at, name in enumerate(piece.takes)))
    buffers = tuple(one for one in graph.buffers if one.tensor in read or one.update in made)
    tensors = dict.fromkeys((*read, *made, *(one.tensor for one in buffers)))
    return replace(
        graph,
        name=f"{graph.name} {piece.segment.name}",
        tensors={name: _as_read(graph, piece, name) for name in tensors},
        inputs=tuple(replace(one, index=at) for at, one in enumerate(inputs)),
        parameters=tuple(one for one in graph.parameters if one.tensor in read),
        buffers=buffers,
        constants={name: value for name, value in graph.constants.items() if name in read},
        ops=piece.ops,
        outputs=piece.gives,
        loss=None,
        in_spec=None,
        out_spec=None,
        leaves=(),
        out_leaves=(),
    )


def _as_read(graph: Graph, piece: Piece, name: str) -> Tensor:
    """A tensor as a piece sees it: what it takes and reads without gradient has none here."""
    tensor = graph.tensors[name]
    if name not in piece.takes or not tensor.needs_grad:
        return tensor
    made = [out for op in piece.ops if name in op.inputs for out in op.outputs]
    return replace(tensor, needs_grad=any(graph.tensors[out].needs_grad for out in made))


def _at_piece(layout: OpLayout, piece: Piece) -> OpLayout:
    """An op's layout with devices counted from 0; what any piece may make is copied on all of its devices."""
    devices = piece.segment.devices
    if set(layout.grid.devices) == set(devices):
        grid = Grid(layout.grid.axes, tuple(devices.index(device) for device in layout.grid.devices))
        return replace(layout, grid=grid)
    every = tuple(range(len(devices)))
    return OpLayout(Grid((Axis("all", len(every)),), every), (Copied(),))


def _given(builder: Builder, name: str, graph: Graph, count: int) -> Need:
    """A tensor as it was made, complete."""
    made = builder.values[builder.made(name)].layout
    layout = resting(made) or copied_on(graph.tensors[name].sizes, tuple(range(count)))
    return Need(layout, layout if graph.tensors[name].needs_grad else None)


def _crossings(parts: tuple[Part, ...]) -> list[Crossing]:
    home = {name: part for part in parts for name in part.piece.gives}
    found = []
    for part in parts:
        for name in part.piece.takes:
            source = home[name]
            given = source.at_home(source.program.values[source.program.outputs[name]].layout)
            taken = part.at_home(part.program.stored[name])
            # what reads it without a gradient has none to send back
            needs = part.program.graph.tensors[name].needs_grad and part.piece.segment.trains
            backward = Move("exchange", taken, given) if needs else None
            names = source.piece.segment.name, part.piece.segment.name
            found.append(Crossing(name, *names, Move("exchange", given, taken), backward))
    return found


def _loans(graph: Graph, parts: tuple[Part, ...]) -> list[Loan]:
    """Parameters of which a device needs only one copy: all but one of the pieces there read it without gradient."""
    found = []
    for parameter in graph.parameters:
        groups: dict[tuple[tuple[int, ...], Layout], list[Part]] = {}
        for part in _holders(parameter.tensor, parts):
            groups.setdefault((part.piece.segment.devices, part.program.stored[parameter.tensor]), []).append(part)
        for group in groups.values():
            trained = [part for part in group if _trains(part, parameter.tensor)]
            owner = (trained or group)[0]
            found += [
                Loan(parameter.tensor, owner.piece.segment.name, part.piece.segment.name)
                for part in group
                if part is not owner and part not in trained
            ]
    return found


def _holders(parameter: str, parts: tuple[Part, ...]) -> list[Part]:
    return [part for part in parts if parameter in part.program.graph.parameter_tensors]


def _trains(part: Part, parameter: str) -> bool:
    tensors = part.program.graph.tensors
    return any(tensors[out].needs_grad for op in part.piece.ops if parameter in op.inputs for out in op.outputs)


def _ties(graph: Graph, parts: tuple[Part, ...], loans: tuple[Loan, ...]) -> list[Tie]:
    found = []
    lent = {(loan.parameter, loan.borrower) for loan in loans}
    for parameter in graph.parameters:
        holders = [
            part
            for part in _holders(parameter.tensor, parts)
            if (parameter.tensor, part.piece.segment.name) not in lent
        ]
        # an optimizer passes over a parameter without a gradient, which it does not do with zeros
        if parameter.trainable and graph.tensors[parameter.tensor].needs_grad and len(holders) > 1:
            lies = [part.at_home(part.program.stored[parameter.tensor]) for part in holders]
            moves = tuple(tuple(Move("exchange", other, one) for other in lies) for one in lies)
            found.append(Tie(parameter.tensor, tuple(part.piece.segment.name for part in holders), moves))
    return found
