"""A rule, tried: an op cut by it, cell by cell, against the op run whole.

In: an op with values (a Specimen), a Rule for it, and what each axis of a grid does. Every cell gets its parts of the
operands by the layout algebra, addends as random ones, makes its local call, forward and backward; outputs and
gradients are put together by their declared roles and compared. Out: an empty text, or how the two differ. Cells that
talk run at the same time, over the emulator's transport. Promised: what a Program would do with the rule is what is
done here; nothing of the process (random state, inputs) is changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.errors import WeftError
from weft.ir.graph import Op, Ref, Tensor
from weft.ir.layout import COPY, PARTIAL, Axis, Cell, Grid, Layout
from weft.ir.oplayout import Cut, OpLayout, Use
from weft.ops.arguments import call_with, overload
from weft.ops.derive import Operands, cell_view, operands
from weft.ops.precision import Float64Mode
from weft.ops.rule import Call, Group, Rule, floating
from weft.runtime.layout.index import put, take
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import CollectiveMismatch, GroupComm, RankFailed, Transport
from weft.runtime.operators.calls import resolve

TOLERANCE = 1e-10
"""Of the largest number met: sums of float64 in another order differ by less, wrong cuts by far more."""

MAGNIFIED = 100.0
"""So many times the effect of one rounding is still rounding."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    WeftError,
)
"""What an operator may raise on arguments that it does not take."""

Values = tuple[torch.Tensor, ...]


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class Specimen:
    """One op at certain sizes, the values of its operands, and what it makes of them when it runs whole.

    `lower`: it computes in a lower float dtype unless it is kept from it. `noise`: what rounding does to its results
    and gradients, where that is a lot.
    """

    op: Op
    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]
    values: Values
    results: Values
    cotangents: Values
    gradients: tuple[torch.Tensor | None, ...]
    lower: bool = True
    noise: tuple[float, ...] = ()

    def noise_of(self, number: int) -> float:
        """How far one of the results, or one of the gradients after them, moves if operands change by a rounding."""
        return self.noise[number] if self.noise else 0.0

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        return tuple(one.sizes for one in self.reads), tuple(one.sizes for one in self.makes)


@dataclass
class Talk:
    """The collectives that one cell entered along each name, in order."""

    forward: dict[str, list[str]] = field(default_factory=dict)
    backward: dict[str, list[str]] = field(default_factory=dict)
    in_backward: bool = False

    def note(self, name: str, kind: str) -> None:
        (self.backward if self.in_backward else self.forward).setdefault(name, []).append(kind)


class _NotedComm:
    """A communicator that writes down what is asked of it."""

    def __init__(self, inner: GroupComm, name: str, talk: Talk) -> None:
        self._inner, self._name, self._talk = inner, name, talk
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self._talk.note(self._name, "all_reduce")
        return self._inner.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._talk.note(self._name, "all_gather")
        return self._inner.all_gather(tensor)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Grad mode on, the random state as before, whatever runs inside."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def precision(lower: bool) -> AbstractContextManager[object]:
    """Float64 throughout, for an op that would compute in a lower dtype (`x.float()`) if it were let."""
    return Float64Mode() if lower else nullcontext()


def callable_of(op: Op, target: str = "") -> Callable[..., Any]:
    """What runs an op's call."""
    target = target or op.target
    if target == op.target and op.function is not None:
        return op.function
    found = overload(target)
    return resolve(target) if found is None else found


def run(
    op: Op, values: Sequence[torch.Tensor], call: Call | None = None, comms: Mapping[str, Any] | None = None
) -> Values:
    """One call on tensors: the op's own if none is given."""
    call = call_with(op) if call is None else call

    def bind(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[int(arg.name)]
        if isinstance(arg, Group):
            return (comms or {})[arg.name]
        if isinstance(arg, tuple):
            return tuple(map(bind, arg))
        return list(map(bind, arg)) if isinstance(arg, list) else arg

    function = callable_of(op, call.target) if call.function is None else call.function
    result = function(*map(bind, call.args), **{name: bind(value) for name, value in call.kwargs})
    made = tuple(result) if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(one, torch.Tensor) for one in made):
        raise TypeError(f"{op.target} returned something that is no tensor")
    return made


def leaves_of(values: Sequence[torch.Tensor], reads: Sequence[Tensor]) -> list[torch.Tensor]:
    """Fresh leaves; those want a gradient that the graph gives one."""
    return [
        value.detach().clone().requires_grad_(tensor.needs_grad and floating(value))
        for value, tensor in zip(values, reads, strict=True)
    ]


def gradients_of(
    results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Of every leaf that wants one; zeros where nothing reaches it."""
    pairs = [(one, told) for one, told in zip(results, cotangents, strict=True) if one.requires_grad]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    found: list[torch.Tensor | None] = [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
    if pairs and wanted:
        chosen = [leaves[i] for i in wanted]
        made = torch.autograd.grad([a for a, _ in pairs], chosen, [b for _, b in pairs], allow_unused=True)
        for i, gradient in zip(wanted, made, strict=True):
            found[i] = found[i] if gradient is None else gradient.detach()
    return tuple(found)


def layout_of(uses: Sequence[Use]) -> OpLayout:
    """A grid with one axis per use; what is carried comes in two addends."""
    axes = tuple(Axis(f"a{i}", len(use.shares) if isinstance(use, Cut) else 2) for i, use in enumerate(uses))
    return OpLayout(Grid(axes, tuple(range(math.prod(axis.size for axis in axes)))), tuple(uses))


def try_cut(it: Specimen, rule: Rule, uses: Sequence[Use], talk: Talk | None = None) -> str:
    """How the op cut so differs from the op run whole; empty if it does not."""
    layout = layout_of(uses)
    try:
        lying = operands(rule, layout)
        work = _Work(it, rule, layout, lying)
        found = work.talking(talk) if work.talks else [work.cell(cell) for cell in layout.grid.cells]
        return work.compare(found)
    except (RankFailed, CollectiveMismatch) as error:
        return str(error).strip().splitlines()[0]
    except FAILURES as error:
        return first_line(error)


Found = tuple[Values, tuple[torch.Tensor | None, ...]]
"""Outputs and gradients of one cell."""


class _Work:
    """One op in one layout."""

    def __init__(self, it: Specimen, rule: Rule, layout: OpLayout, lying: Operands) -> None:
        self.it, self.rule, self.layout, self.lying = it, rule, layout, lying
        self.values = [_addends(v, one.layout) for v, one in zip(it.values, lying.inputs, strict=True)]
        self.cotangents = [_addends(v, one.grad) for v, one in zip(it.cotangents, lying.outputs, strict=True)]
        self.talks = any(isinstance(use, Cut) and use.name in rule.algorithms for use in layout.uses)

    def cell(self, cell: Cell, transport: Transport | None = None, talk: Talk | None = None) -> Found:
        """What one cell makes."""
        it, inputs, outputs = self.it, self.lying.inputs, self.lying.outputs
        locals_ = leaves_of([_part(v, one.layout, cell) for v, one in zip(self.values, inputs, strict=True)], it.reads)
        view = cell_view(self.rule, self.layout, cell)
        call = None if self.rule.local is None else self.rule.local(it.op, view)
        told = [_part(v, one.grad, cell) for v, one in zip(self.cotangents, outputs, strict=True)]
        with precision(it.lower):
            results = run(it.op, locals_, call, self._comms(cell, transport, talk))
            self._fits(results, [view.output_shape(i) for i in range(len(outputs))])
            if talk is not None:
                talk.in_backward = True
            gradients = gradients_of(results, told, locals_)
        return tuple(one.detach() for one in results), gradients

    def _fits(self, results: Values, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse results of other shapes than the layout says."""
        if len(results) != len(shapes):
            raise ValueError(f"a part makes {len(results)} tensors, the whole {len(shapes)}")
        for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            if tuple(result.shape) != shape:
                raise ValueError(f"a part of output {i} has the shape {tuple(result.shape)}, not {shape}")

    def talking(self, noted: Talk | None) -> list[Found]:
        """All cells at once, each a rank of the emulator."""
        cells = list(self.layout.grid.cells)

        def body(transport: Transport) -> Found:
            talk = Talk() if noted is None or transport.rank else noted
            return self.cell(cells[transport.rank], transport, talk)

        return run_ranks(len(cells), body, timeout=20.0)

    def _comms(self, cell: Cell, transport: Transport | None, talk: Talk | None) -> dict[str, Any]:
        if transport is None:
            return {}
        return {
            name: _NotedComm(GroupComm(transport, self.layout.peers(name, cell)), name, talk or Talk())
            for name in self.layout.cut_names
        }

    def compare(self, found: Sequence[Found]) -> str:
        """Put together and compared: outputs first, then gradients."""
        cells = list(self.layout.grid.cells)
        for i, (expected, one) in enumerate(zip(self.it.results, self.lying.outputs, strict=True)):
            reason = differs(expected, one.layout, cells, [results[i] for results, _ in found], self.it.noise_of(i))
            if reason:
                return f"output {i} {reason}"
        for i, (wanted, one) in enumerate(zip(self.it.gradients, self.lying.inputs, strict=True)):
            if wanted is not None:
                pieces = [gradients[i] for _, gradients in found]
                noise = self.it.noise_of(len(self.it.results) + i)
                reason = differs(wanted, one.grad, cells, [p for p in pieces if p is not None], noise)
                if reason:
                    return f"the gradient of operand {i} {reason}"
        return ""


def differs(
    expected: torch.Tensor, layout: Layout, cells: Sequence[Cell], pieces: Sequence[torch.Tensor], noise: float = 0.0
) -> str:
    """How the pieces put together differ from what is expected: addends added, copies compared."""
    if expected.dtype == torch.bool and PARTIAL in layout.roles:
        return "is a truth value, which has no addends"
    copies = [i for i, role in enumerate(layout.roles) if role == COPY]
    found, firsts = torch.zeros_like(expected), dict[Cell, torch.Tensor]()
    for cell, piece in zip(cells, pieces, strict=True):
        if piece.dtype != expected.dtype:
            return f"is {piece.dtype} on a part, {expected.dtype} on the whole"
        origin = tuple(0 if i in copies else at for i, at in enumerate(cell))
        if origin != cell:
            if reason := _apart(piece, firsts[origin], (), noise):
                return f"is not the same on cells that should hold copies ({reason})"
            continue
        firsts[cell] = piece
        put(found, layout.part(cell).ranges, piece, add=found.dtype != torch.bool)
    return _apart(found, expected, tuple(firsts.values()), noise)


def _apart(found: torch.Tensor, expected: torch.Tensor, addends: Values, noise: float) -> str:
    """How far two tensors lie apart, measured by the largest number that went into them."""
    if found.shape != expected.shape:
        return f"has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if torch.equal(found, expected):
        return ""
    if not floating(found):
        return "differs"
    # which of infinity and nonsense comes out depends on the order of a sum
    same = (found == expected) | ~(found.isfinite() | expected.isfinite())
    gap = torch.where(same, torch.zeros_like(found), found - expected).abs()
    difference, scale = gap.max().item(), max(map(_largest, (found, expected, *addends)))
    return "" if difference <= TOLERANCE * scale + MAGNIFIED * noise else f"differs by {difference:.3g}"


def _largest(tensor: torch.Tensor) -> float:
    """The largest of the finite numbers in a tensor, signs aside."""
    finite = torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _addends(value: torch.Tensor, layout: Layout) -> dict[Cell, torch.Tensor]:
    """For each combination of coordinates on the partial axes an addend; they sum to the value."""
    axes = [i for i, role in enumerate(layout.roles) if role == PARTIAL]
    if not axes:
        return {(): value}
    shares = list(itertools.product(*(range(layout.grid.axes[i].size) for i in axes)))
    scale = _typical(value)
    made = {s: torch.randn_like(value) * scale if floating(value) else torch.zeros_like(value) for s in shares[1:]}
    return {shares[0]: value - sum(made.values(), torch.zeros_like(value)), **made}


def _typical(value: torch.Tensor) -> float:
    """The size of an ordinary number in a tensor."""
    finite = value[value.isfinite()].abs() if floating(value) else value[:0]
    return float(finite.mean()) if finite.numel() else 1.0


def _part(addends: Mapping[Cell, torch.Tensor], layout: Layout, cell: Cell) -> torch.Tensor:
    part = layout.part(cell)
    return take(addends[part.share], part.ranges)
