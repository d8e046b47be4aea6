"""What rules are made of: an op as a rule sees it, dims with names, local calls.

In: an op and the tensors it reads and makes (OpView). Out: a Rule, from text (`it.text`) or from dims (`it.rule`).
Promised: every dim has exactly the size of the tensor's, all names have a size, and linear sets only hold
floating-point operands: a mistake in a rule fails here, not in a run. Also what local calls have in common: the
communicators of the names that are cut, the op's own call where none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch

from weft.errors import RuleError
from weft.ir.graph import Graph, Op, Tensor, refs
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call_with, operand, overload
from weft.ops.grammar import instantiate, parse
from weft.ops.rule import (
    Call,
    CellView,
    Dim,
    Dims,
    Factor,
    Group,
    Linear,
    Local,
    Rule,
    dim,
    fixed,
    linear_sets,
    names_of,
)
from weft.runtime.operators.algorithms import Exchange

COPY_IT = "keep the op copied: plan.trans(op, copy(...))"


class Talking(TypedDict, total=False):
    """What a rule says of names along which cells talk, as in `Rule`."""

    algorithms: Mapping[str, Exchange]
    local: Local | None


class Marks(Talking, total=False):
    """What else a rule says, as in `Rule`; `sizes` only for names that stand alone in no dim."""

    sizes: Mapping[str, int]
    summed: Iterable[str]
    frozen: Iterable[str]
    added: Iterable[int]
    linear: Linear
    source: str


@dataclass(frozen=True)
class OpView:
    """What a rule may know of an op."""

    op: Op
    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]

    @classmethod
    def of(cls, op: Op, graph: Graph) -> OpView:
        """An op of a graph."""
        return cls(op, tuple(graph.tensors[name] for name in op.inputs), tuple(graph.tensors[n] for n in op.outputs))

    @cached_property
    def args(self) -> dict[str, Any]:
        """Every argument by its name in the schema; tensor operand i as `Ref(str(i))`."""
        return arguments(self.op)

    @property
    def kind(self) -> str:
        return self.op.kind

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of all that is read."""
        return tuple(tensor.sizes for tensor in self.reads)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first operand."""
        return self.reads[0].sizes

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.makes[0].sizes

    def where(self, name: str) -> int:
        """The position among the op's inputs of a tensor argument that must be there."""
        found = operand(self.args[name])
        assert found is not None, f"{self.op.target} has no {name}"
        return found

    def error(self, message: str, remedy: str = COPY_IT) -> RuleError:
        """Why there is no rule, with the user's line."""
        return RuleError(message, place=self.op.place, remedy=remedy)

    def rule(self, inputs: Sequence[Dims], outputs: Sequence[Dims], **marks: Unpack[Marks]) -> Rule:
        """A rule of dims. Names that stand alone in a dim get their size from the tensor, others from `sizes`."""
        bound = dict(marks.get("sizes", {}))
        pairs = list(zip((*inputs, *outputs), (*self.reads, *self.makes), strict=True))
        for dims, tensor in pairs:
            assert len(dims) == len(tensor.sizes), f"{tensor} has dims {' '.join(map(str, dims))}"
            for one, size in zip(dims, tensor.sizes, strict=True):
                if len(one.products) == 1 and len(one.products[0]) == 1 and isinstance(one.products[0][0], str):
                    bound.setdefault(one.products[0][0], size)
        for dims, tensor in pairs:
            assert tuple(one.extent(bound) for one in dims) == tensor.sizes, f"{tensor}: {' '.join(map(str, dims))}"
        present = {name for dims in (*inputs, *outputs) for name in names_of(dims)}
        exchanges = {name: exchange for name, exchange in marks.get("algorithms", {}).items() if name in present}
        return Rule(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            sizes={name: size for name, size in bound.items() if name in present},
            summed=frozenset(marks.get("summed", ())) & present,
            frozen=frozenset(marks.get("frozen", ())) & present,
            algorithms=exchanges,
            added=frozenset(marks.get("added", ())),
            linear=linear_sets(marks.get("linear", ()), self.reads, self.makes),
            local=marks.get("local"),
            source="algorithm" if exchanges else marks.get("source", "table"),
        )

    def beside(self, whole: Collection[int], **marks: Unpack[Marks]) -> Rule:
        """A rule of dims that the first operand and all outputs share, but for those at `whole`: nobody may cut them,
        and they may have other sizes on both sides. Other operands are not cut at all."""
        source, *targets = (numbered_dims(one.sizes, whole=whole) for one in (self.reads[0], *self.makes))
        return self.rule([source, *fixed_dims(*self.reads[1:])], targets, **marks)

    def text(
        self,
        text: str,
        *,
        sizes: Mapping[str, int] | None = None,
        linear: Sequence[Sequence[int]] = (),
        exchange: Exchange | None = None,
        local: Local | None = None,
        source: str = "table",
        ones: bool = False,
    ) -> Rule:
        """A rule of text, whose operands are the tensor arguments in the order of the schema, left out ones too.

        Args:
            sizes: sizes of names that the shapes do not tell.
            linear: sets of operands, by position in the text.
            exchange: what is exchanged along every name marked `!`.
            ones: names of size 1 stay names.
        """
        made = instantiate(
            parse(text),
            self.reads,
            self.makes,
            present=self.operands,
            sizes=sizes,
            linear=linear,
            algorithms=exchange,
            ones=ones,
        )
        return replace(made, local=local, source="algorithm" if made.algorithms else source)

    @property
    def operands(self) -> list[int | None]:
        """For each tensor argument of the schema its position among the op's inputs; None where it was left out."""
        operator = overload(self.op.target)
        if operator is None:
            return list(range(len(self.reads)))
        found: list[int | None] = []
        for value in (self.args[one.name] for one in operator._schema.arguments if "Tensor" in str(one.type)):
            found += [operand(ref) for ref in refs(value)] or [None]
        return found


RuleOf = Callable[[OpView], Rule]
"""Computes the rule of one op."""


def row(text: str, *linear: Sequence[int], local: Local | None = None) -> RuleOf:
    """The rule that a text says, and the sets of its operands in which the operator is linear."""
    return lambda it: it.text(text, linear=linear, local=local)


def rules_of(rule: RuleOf, names: str) -> dict[str, RuleOf]:
    """One rule for several operators of ATen."""
    return {f"aten.{name}": rule for name in names.split()}


# Dims.


def named(name: str, size: int) -> Dim:
    """A dim of that name; one that holds a single index, or none, has no name, for it cannot be cut."""
    return dim(name) if size > 1 else fixed(size)


def numbered_dims(sizes: Sequence[int], prefix: str = "d", whole: Collection[int] = ()) -> Dims:
    """`d0 d1 ...`, without names for dims of size 1 and for those at the positions `whole`."""
    return tuple(fixed(size) if i in whole else named(f"{prefix}{i}", size) for i, size in enumerate(sizes))


def fixed_dims(*tensors: Tensor) -> list[Dims]:
    """Of each tensor dims that nobody may cut."""
    return [tuple(map(fixed, tensor.sizes)) for tensor in tensors]


def replaced(dims: Sequence[Dim], at: int, *others: Dim) -> Dims:
    """The same dims with others in the place of one of them."""
    return (*dims[:at], *others, *dims[at + 1 :])


def aligned(dims: Dims, shape: Sequence[int], sizes: Sequence[int]) -> Dims | None:
    """Dims of an operand of `sizes` that broadcasts to `shape`; None if it does not."""
    missing = len(shape) - len(sizes)
    if missing < 0:
        return None
    found = []
    for one, whole, size in zip(dims[missing:], shape[missing:], sizes, strict=True):
        if size not in (whole, 1):
            return None
        found.append(one if size == whole else dim())
    return tuple(found)


def broadcasting(dims: Dims, shape: Sequence[int], tensors: Iterable[Tensor]) -> list[Dims]:
    """Dims of operands that broadcast to `shape`."""
    found = []
    for tensor in tensors:
        own = aligned(dims, shape, tensor.sizes)
        assert own is not None, f"{tensor} does not broadcast to {tuple(shape)}"
        found.append(own)
    return found


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The common shape of operands that broadcast, from the right.

    >>> broadcast([(4, 1), (3,)])
    (4, 3)
    """
    return tuple(torch.broadcast_shapes(*shapes))


def product_dim(*factors: Factor, sizes: Mapping[str, int]) -> Dim:
    """One dim of several factors, those of size 1 left out."""
    return dim(*(factor for factor in factors if (sizes[factor] if isinstance(factor, str) else factor) != 1))


# Local calls.


def groups(cell: CellView, names: Iterable[str]) -> tuple[Group, ...]:
    """Communicators of those names that are cut."""
    return tuple(Group(name) for name in names if name in cell.cut)


def is_empty(cell: CellView) -> bool:
    """True if some operand of the cell holds nothing: not every ATen operator takes that."""
    return any(math.prod(cell.input_shape(i)) == 0 for i in range(len(cell.inputs)))


def when_cut(
    names: Collection[str],
    made: Call | Callable[[CellView], Call],
    *,
    talks: bool = True,
    empty: bool = False,
    own: Local = lambda op, cell: call_with(op),
) -> Local:
    """`made` where one of the names is cut, the op's `own` call elsewhere.

    Args:
        talks: it is given `comms`, the communicators along the names that are cut.
        empty: `made` also where a part holds nothing, which the operator itself does not take.
    """

    def local(op: Op, cell: CellView) -> Call:
        comms = groups(cell, names)
        if not comms and not (empty and is_empty(cell)):
            return own(op, cell)
        found = made if isinstance(made, Call) else made(cell)
        return replace(found, kwargs=(*found.kwargs, ("comms", comms))) if talks else found

    return local


def talking(
    names: Collection[str], exchange: Exchange, made: Call | Callable[[CellView], Call], *, empty: bool = False
) -> Talking:
    """What a rule says of names along which cells talk by the call `made`."""
    return {"algorithms": dict.fromkeys(names, exchange), "local": when_cut(names, made, empty=empty)}


def refuse_empty(op: Op, cell: CellView, names: Iterable[str]) -> None:
    """Refuse a part that holds nothing of a name: torch's kernels fail on it, or answer in the wrong shape."""
    for name in names:
        if not count(cell.names[name]):
            raise RuleError(
                f"{op.kind} cannot run on a part that holds nothing of {name!r}",
                place=op.place,
                remedy="cut it into fewer parts, or give each part a share",
            )


def never_empty(op: Op, cell: CellView) -> Call:
    """The op's own call, on parts that hold something."""
    refuse_empty(op, cell, cell.names)
    return call_with(op)
