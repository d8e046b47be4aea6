"""Colors: logical dims that flow through the graph, under another name in every op.

In: the rules of a graph's ops. Out: sets of (op, name) and (tensor, dim) that are one logical dim: the batch, the
heads of one layer, the vocabulary. A color has `units`; each member says how they lie inside it: its indices are
`groups` laid end to end, each of all the units, exactly what a `Cut` needs. A dim `n` of 64 that a view turns into
`(h d)` with 4 heads has 4 units; one that is split in three parts that each have the color has 3 groups.

A name meets a tensor dim where a rule has it as the outermost factor there. The link is made if both sides can be
described by the same groups, one of them refined if need be, and at least `parts` units remain; otherwise there
is none, and a reshard will stand there. Ops may have a color under a name that cannot be cut, or under two names (rows
and columns of attention): of those one may be cut, chosen by `Color.members`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.rule import Dim, Rule
from weft.plan.primitives import CutBy, outermost

Groups = tuple[int, ...]


class OpName(NamedTuple):
    """A name of an op's rule."""

    op: str
    name: str


class TensorDim(NamedTuple):
    """A dim of a tensor."""

    tensor: str
    dim: int


Node = OpName | TensorDim


@dataclass(frozen=True)
class Member:
    """The name under which an op has a color. `talks`: parts of it would have to exchange values."""

    name: str
    groups: Groups
    units: int
    cuttable: bool
    talks: bool

    def cut(self, parts: int, axis: str) -> CutBy:
        """The cut of this name into equal shares of the color's units."""
        same = len(set(self.groups)) == 1
        groups: int | Groups = len(self.groups) if same else self.groups
        units = None if self.units == math.gcd(*self.groups) else self.units
        return CutBy(self.name, (1,) * parts, axis, groups, units)


@dataclass(frozen=True, eq=False)
class Color:
    """One logical dim.

    Args:
        number: position among the graph's colors, in execution order.
        units: into so many pieces it may be cut at most.
        nodes: everything that has it, and the groups there.
        names: for each op the names that have it, the one to cut first.
    """

    number: int
    units: int
    nodes: Mapping[Node, Groups]
    names: Mapping[str, tuple[Member, ...]]

    @cached_property
    def members(self) -> Mapping[str, Member]:
        """The ops that may be cut by it, in execution order, each with the name to cut: the only one, or the one found
        in its outputs."""
        return {op: members[0] for op, members in self.names.items() if members[0].cuttable}

    @cached_property
    def dims(self) -> Mapping[str, tuple[int, ...]]:
        """The dims of each tensor that have it."""
        found: dict[str, tuple[int, ...]] = {}
        for node in self.nodes:
            if isinstance(node, TensorDim):
                found[node.tensor] = (*found.get(node.tensor, ()), node.dim)
        return found


def is_of_inputs(graph: Graph, color: Color) -> bool:
    """Whether an input has the color."""
    return any(one.tensor in color.dims for one in graph.inputs)


@dataclass(frozen=True)
class Colors:
    """All colors of a graph that can be cut into so many parts as were asked for."""

    all: tuple[Color, ...]

    def __iter__(self) -> Iterator[Color]:
        return iter(self.all)

    @cached_property
    def _by_node(self) -> Mapping[Node, Color]:
        return {node: color for color in self.all for node in color.nodes}

    def at(self, node: Node) -> Color | None:
        """The color of an op's name or of a tensor's dim."""
        return self._by_node.get(node)


def find_inner_colors(graph: Graph, rules: RuleBook, parts: int) -> Colors:
    """The colors of a graph, where a dim that holds two logical dims is taken for the one that leads somewhere.

    That is the inner one if the outer is a dim of an input, or if some op needs all of the outer one: heads that a
    view lays inside the batch (`(b h)`), or inside the choice of query, key and value (`(3 h d)`), are found so.
    """
    # what is too short to be cut into `parts` is still followed to where it comes from
    union = _united(graph, rules, 2, (), frozenset())
    given = {one.tensor for one in graph.inputs}
    fixed = {
        TensorDim(tensor, position)
        for op in graph.ops
        for tensor, dims in zip(op.inputs, rules.rule(op).inputs, strict=True)
        for position, one in enumerate(dims)
        if not one.names and graph.tensors[tensor].sizes[position] > 1
    }
    apart = frozenset(
        node
        for one in union.sets()
        if any(isinstance(dim, TensorDim) and (dim.tensor in given or dim in fixed) for dim in one.nodes)
        for node in one.nodes
        if isinstance(node, OpName)
    )
    hidden = any(
        _inner(op, one, rule, apart) is not None
        for op in graph.ops
        for rule in (rules.rule(op),)
        for dims in (*rule.inputs, *rule.outputs)
        for one in dims
    )
    if hidden or parts != 2:
        union = _united(graph, rules, parts, (), apart)
    return Colors(tuple(_colors(graph, rules, union.sets(), parts)))


def _inner(op: Op, one: Dim, rule: Rule, apart: frozenset[OpName]) -> str | None:
    """The first name of a dim that is not to be left apart, if the outermost is."""
    first = outermost(one, rule)
    if first is None or OpName(op.name, first) not in apart:
        return None
    return outermost(one, rule, [name for name in one.names if OpName(op.name, name) in apart])


def find_colors(graph: Graph, rules: RuleBook, parts: int, same: Sequence[TensorDim] = ()) -> Colors:
    """The colors of a graph, units of at least `parts`.

    Args:
        graph: where to look.
        rules: of its ops.
        parts: links that would leave fewer units are not made.
        same: dims that are known to be one (the batch dims of all inputs).
    """
    union = _united(graph, rules, parts, same, frozenset())
    return Colors(tuple(_colors(graph, rules, union.sets(), parts)))


def _united(graph: Graph, rules: RuleBook, parts: int, same: Sequence[TensorDim], apart: frozenset[OpName]) -> _Union:
    """All names and dims, linked. Names in `apart` are not followed through dims that hold others inside them."""
    union = _Union(graph, parts, apart)
    for dim in same[1:]:
        union.link(same[0], union.groups(same[0]), dim, union.groups(dim))
    for op in graph.ops:
        rule = rules.rule(op)
        for tensors, operands in ((op.inputs, rule.inputs), (op.outputs, rule.outputs)):
            for tensor, dims in zip(tensors, operands, strict=True):
                for position, one in enumerate(dims):
                    union.meet(op, rule, one, TensorDim(tensor, position))
    return union


@dataclass
class _Set:
    """A color in the making."""

    units: int
    nodes: dict[Node, Groups]


class _Union:
    """Union-find whose members carry groups. Local to `find_colors`."""

    def __init__(self, graph: Graph, parts: int, apart: frozenset[OpName]) -> None:
        self._graph, self._parts, self._apart = graph, parts, apart
        self._set_of: dict[Node, _Set] = {}

    def sets(self) -> list[_Set]:
        return list({id(one): one for one in self._set_of.values()}.values())

    def _set(self, node: Node, size: int) -> _Set:
        if node not in self._set_of:
            self._set_of[node] = _Set(size, {node: (size,)})
        return self._set_of[node]

    def groups(self, node: TensorDim) -> Groups:
        """How a tensor dim is divided so far."""
        return self._set(node, self._graph.tensors[node.tensor].sizes[node.dim]).nodes[node]

    def meet(self, op: Op, rule: Rule, one: Dim, dim: TensorDim) -> None:
        """Link the outermost name of a dim with the dim of the tensor standing there."""
        name = _inner(op, one, rule, self._apart) or outermost(one, rule)
        if name is None or self._graph.tensors[dim.tensor].sizes[dim.dim] < 2:
            return
        node = OpName(op.name, name)
        groups = self._set(node, rule.sizes[name]).nodes[node]
        expanded = expand(one, name, groups, rule.sizes)
        if expanded is not None:
            self.link(node, expanded, dim, self.groups(dim))

    def link(self, a: Node, groups_a: Groups, b: Node, groups_b: Groups) -> None:
        """Make two nodes one color if their groups, both in the space of one tensor dim, can be made equal."""
        left, right = self._set_of[a], self._set_of[b]
        if left is right:
            return
        for fine, coarse, target, source in ((left, right, groups_a, groups_b), (right, left, groups_b, groups_a)):
            shares = refinement(source, coarse.units, target)
            if shares is None:
                continue
            units = math.gcd(fine.units, *shares)
            if units >= self._parts:
                self._merge(fine, coarse, shares, units)
                return

    def _merge(self, fine: _Set, coarse: _Set, shares: Groups, units: int) -> None:
        if len(shares) > 1:
            for node, groups in coarse.nodes.items():
                coarse.nodes[node] = tuple(g // coarse.units * share for g in groups for share in shares)
        large, small = (fine, coarse) if len(fine.nodes) >= len(coarse.nodes) else (coarse, fine)
        large.nodes.update(small.nodes)
        large.units = units
        for node in small.nodes:
            self._set_of[node] = large


def expand(one: Dim, name: str, groups: Groups, sizes: Mapping[str, int]) -> Groups | None:
    """The groups of a dim, given those of a name in it; None if part of the dim does not have the name.

    >>> from weft.ops.rule import dim
    >>> expand(dim(3, "n"), "n", (4,), {"n": 4})
    (4, 4, 4)
    >>> expand(dim("h", "d"), "h", (4,), {"h": 4, "d": 16})
    (64,)
    """
    found: list[int] = []
    for factors in one.products:
        if name not in factors:
            return None
        extents = [sizes[factor] if isinstance(factor, str) else factor for factor in factors]
        at = factors.index(name)
        inner = math.prod(extents[at + 1 :])
        found += [group * inner for group in groups] * math.prod(extents[:at])
    return tuple(found)


def refinement(groups: Groups, units: int, target: Groups) -> Groups | None:
    """How to divide the units of every group so that the groups become those of `target`; None if impossible.

    >>> refinement((12,), 12, (4, 4, 4))
    (4, 4, 4)
    >>> refinement((64,), 4, (64,))
    (4,)
    """
    ratio, rest = divmod(len(target), len(groups))
    if rest or not ratio or not units:
        return None
    unit = groups[0] // units
    if any(size % unit for size in target[:ratio]):
        return None
    shares = tuple(size // unit for size in target[:ratio])
    made = tuple(group // units * share for group in groups for share in shares)
    return shares if sum(shares) == units and made == target else None


def _colors(graph: Graph, rules: RuleBook, sets: Iterable[_Set], parts: int) -> Iterator[Color]:
    """The finished colors, in order of the first op that has them."""
    position = {op.name: i for i, op in enumerate(graph.ops)}

    def first(one: _Set) -> tuple[int, str]:
        return min(((position[n.op], n.name) for n in one.nodes if isinstance(n, OpName)), default=(len(position), ""))

    large = [one for one in sets if one.units >= parts and any(isinstance(node, OpName) for node in one.nodes)]
    for number, one in enumerate(sorted(large, key=first)):
        found: dict[str, list[Member]] = {}
        for node in sorted((n for n in one.nodes if isinstance(n, OpName)), key=lambda n: position[n.op]):
            rule = rules.rule(graph.by_name[node.op])
            cuttable = node.name not in rule.frozen
            exchange = rule.algorithms.get(node.name)
            talks = exchange is not None and bool(exchange.forward or exchange.backward)
            found.setdefault(node.op, []).append(Member(node.name, one.nodes[node], one.units, cuttable, talks))
        names = {op: tuple(_best_first(members, rules.rule(graph.by_name[op]))) for op, members in found.items()}
        yield Color(number, one.units, dict(one.nodes), names)


def _best_first(members: list[Member], rule: Rule) -> list[Member]:
    """Names that may be cut first, among them those that outputs have, among them silent ones."""
    return sorted(members, key=lambda m: (not m.cuttable, m.name not in rule.made, m.talks, rule.names.index(m.name)))
