"""Sheet: all that the functions of one file share: names, tables, imports, methods, words for moves.

In: a Program and the ranks whose text this is. `Body` asks it for everything that is not local to one function.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.codegen.cells import Cells
from weft.codegen.irregular import move_entry
from weft.codegen.moves import MoveWords
from weft.codegen.names import RESERVED, base_names, free_name, legal
from weft.codegen.sources import Sources
from weft.codegen.spread import Spreads
from weft.codegen.statements.operators import PRODUCTS
from weft.codegen.statements.reads import INPUT
from weft.codegen.statements.spent import spent_values
from weft.codegen.tables import Tables
from weft.codegen.text import literal, statement
from weft.ir.graph import Buffer, Graph, Op, Parameter
from weft.ir.layout import Layout
from weft.ir.program import (
    Chunks,
    Compute,
    Move,
    Program,
    Recompute,
    Reshard,
    Step,
    Use,
    outputs_of,
    values_read,
    walk,
)
from weft.ir.ranges import count
from weft.ops.book import RuleBook
from weft.ops.rule import Rule
from weft.runtime.layout import moves as rt_moves
from weft.runtime.layout.cuts import Cut
from weft.runtime.links.single_rank import SingleRank
from weft.runtime.operators.calls import FUNCTIONS
from weft.runtime.program.module import Container, ParallelModule

_CONTAINER = Container()
BodyLines = Callable[..., tuple[list[str], list[str], Mapping[str, str]]]


@dataclass(frozen=True)
class Layer:
    """A layer printed once for all of its kind.

    Args:
        prefix: of the first one's parameters (`transformer.h.0.`).
        variable: that stands for the layer's container.
        draw: number of the first one's first random draw.
    """

    prefix: str
    variable: str
    draw: int


class Sheet:
    """What one file's functions share."""

    def __init__(
        self,
        program: Program,
        ranks: tuple[int, ...],
        spreads: Spreads,
        tables: Tables,
        book: RuleBook,
        words: MoveWords,
        inputs: Mapping[str, str],
        *,
        traced: bool = False,
    ) -> None:
        self.traced = traced
        """Every op tells what it made."""
        self.program, self.ranks, self.spreads, self.tables, self.words = program, ranks, spreads, tables, words
        self.cells, self._book = Cells(book), book
        self.graph = program.graph
        self.imports: dict[str, set[str]] = {}
        self.definitions: dict[str, str] = {}
        """Statements that stand before all others, by what they define."""
        self.sources = Sources()
        self.methods: list[list[str]] = []
        self.method_names: set[str] = set()
        self._texts: dict[str, str] = {}
        self._bases = base_names(self.graph)
        self.syncs: Mapping[str, tuple[Move, ...]] = {
            source: moves for sync in program.syncs for source, moves in zip(sync.sources, sync.moves, strict=True)
        }
        self.named: tuple[Parameter | Buffer, ...] = (*self.graph.parameters, *self.graph.buffers)
        self._dotted = {one.tensor: one.names[0] for one in self.named}
        self._constants = _equal_constants(self.graph)
        self.inputs = inputs
        self.reserved = {*rt_moves.MOVES, "Cut", "Part", "Table", "Given", "ParallelModule", "Container"}
        self.reserved |= {function.__name__ for function in FUNCTIONS.values()}
        self.reserved |= {template.partition("(")[0] for template in PRODUCTS.values()}
        self.body: BodyLines | None = None
        self._direct, self.spent = _direct(program), spent_values(program)
        self.requiring = _requiring(self.graph)
        self._readings: dict[str, tuple[int, set[tuple[rt_moves.Move, ...]]]] | None = None
        for op in self.graph.ops:
            if op.function is not None:
                self.reserved.add(getattr(op.function, "cls", op.function).__qualname__.split(".")[0])

    def need(self, module: str, names: Iterable[str]) -> None:
        """Import these names."""
        if found := set(names):
            self.imports.setdefault(module, set()).update(found)

    def need_cut(self, cut: Cut) -> str:
        """A cut as text; what it needs is imported."""
        if "Cut(" in str(cut):
            self.need("weft.runtime.layout.cuts", {"Cut"})
        return str(cut)

    def need_moves(self, words: Sequence[rt_moves.Move]) -> str:
        """Moves as text, a list; what they need is imported."""
        for one in words:
            self.need("weft.runtime.layout.moves", {one.kind})
            self.need_cut(one.cut)
            self.need_cut(one.joined)
        return f"[{', '.join(map(str, words))}]"

    # Names.

    def base(self, value: str) -> str:
        """What a value may be called."""
        if value.startswith(INPUT):
            return self.inputs[value.removeprefix(INPUT)]
        tensor = self.program.values[value].tensor
        if tensor in self.inputs:
            return self.inputs[tensor]
        if tensor in self._bases:
            return self._bases[tensor]
        return legal("_".join(word for word in tensor.split(".")[-2:] if not word.isdigit()))

    def is_read(self, value: str) -> bool:
        return self.program.reads[value] > 0

    def read_once(self, value: str) -> bool:
        return self.program.reads[value] == 1

    def stored(self, value: str, layer: Layer | None) -> tuple[str, bool]:
        """A tensor that is used as it is stored, and whether it is the layer's own."""
        held = self.program.values[value]
        text, layered = self.home(held.tensor, layer)
        parameter = self.graph.parameter_tensors.get(held.tensor)
        detached = parameter is not None and parameter.trainable and held.grad is None
        return (f"{text}.detach()" if detached else text), layered

    def home(self, tensor: str, layer: Layer | None) -> tuple[str, bool]:
        """Where a parameter, buffer or constant stands, and whether it is the layer's own."""
        name = self.stored_name(tensor)
        if tensor not in self._dotted:
            return f'self.constants["{name}"]', False
        if layer is not None and name.startswith(layer.prefix):
            return f"{layer.variable}{attribute(name.removeprefix(layer.prefix))}", True
        return f"self.model{attribute(name)}", False

    def shape(self, value: str) -> str:
        """The local shape, for a comment."""
        layout = self.program.values[value].layout
        words = []
        for dim, size in enumerate(layout.shape):
            table = layout.ranges[dim]
            found = sorted({size} if table is None else {count(ranges) for ranges in table})
            words.append(str(found[0]) if len(found) == 1 else f"{found[0]}..{found[-1]}")
        return f"({', '.join(words)}{',' if len(words) == 1 else ''})"

    def used_as_stored(self, value: str) -> bool:
        """True if the value is the stored tensor itself, whose `.grad` its gradient becomes."""
        return value in self._direct

    def readings(self, tensor: str) -> tuple[int, set[tuple[rt_moves.Move, ...]]]:
        """How many operators read a parameter as it is stored (1 if it is not used so), those in loops twice at least;
        and by which all-gathers it is brought to others."""
        if self._readings is None:
            reads = _reads(self.program.steps, 1)
            found: dict[str, tuple[int, set[tuple[rt_moves.Move, ...]]]] = {}
            for step in walk(self.program.steps):
                if isinstance(step, Use):
                    value = self.program.values[step.value]
                    _, ways = found.setdefault(value.tensor, (1, set()))
                    if step.value in self._direct and value.grad is not None:
                        found[value.tensor] = reads[step.value], ways
                    stored = self.program.stored[value.tensor]
                    words = self.words.all(step.moves, stored) if step.value in self.syncs else None
                    if words is not None and [one.kind for one in words] == ["all_gather"]:
                        ways.add(words)
            self._readings = found
        return self._readings.get(tensor, (1, set()))

    def stored_name(self, tensor: str) -> str:
        """The dotted name of a stored tensor; equal constants have one name."""
        if tensor in self.graph.constants:
            return self._constants[tensor]
        return self._dotted.get(tensor, tensor)

    def stores(self, tensor: str) -> bool:
        """True if the team's ranks store a part of a tensor."""
        return self.ranks[0] in self.program.stored[tensor].grid.cells_on

    def num_layers(self, stack: str) -> int:
        """How many numbered children a container has."""
        names = [name for one in self.named for name in one.names]
        start = f"{stack}."
        words = {name.removeprefix(start).split(".")[0] for name in names if name.startswith(start)}
        return sum(word.isdigit() for word in words)

    def rule(self, op: Op, algorithm: str = "") -> Rule:
        return self._book.rule(op, algorithm)

    def form(self, op: Op) -> Hashable:
        """Equal for ops that make the same call, but for the number of a random draw."""
        form: Any = self._book.form(op)
        return form[:-1], form[-1] is None, op.function

    # What steps mean.

    def takes_part(self, moves: Iterable[Move], *layouts: Layout) -> bool:
        """True if the team's ranks hold something of it."""
        rank = self.ranks[0]
        every = [*layouts, *(one for move in moves for one in (move.source, move.target))]
        return any(rank in layout.grid.cells_on for layout in every)

    def does_something(self, step: Step) -> bool:
        """True if the team's ranks take part in a step."""
        match step:
            case Compute():
                return self.ranks[0] in step.layout.grid.cells_on
            case Reshard():
                ends = (self.program.values[name].layout for name in (step.source, step.target))
                return self.takes_part((*step.forward, *(step.backward or ())), *ends)
            case Chunks() | Recompute():
                return any(map(self.does_something, step.body))
            case _:
                return False

    def leaving(self, step: Recompute) -> tuple[str, ...]:
        """Values made inside a region that are read outside of it."""
        made = {name for inner in step.body for name in outputs_of(inner)}
        inside = Counter(values_read(step))
        return tuple(sorted(name for name in made if self.program.reads[name] > inside[name]))

    def move_key(
        self, value: str, forward: Iterable[Move], backward: Iterable[Move] | None, tensor: str, source: str | None
    ) -> str:
        """The key under which an irregular change of layout stands in the tables."""
        entries = {
            rank: move_entry(self.program, self.words.transfers, rank, value, forward, backward, tensor, source)
            for rank in self.ranks
        }
        return self.tables.key("moves", self.base(value), entries)

    # Methods.

    def method(
        self,
        kind: str,
        steps: Sequence[Step],
        arguments: Sequence[str],
        returned: Sequence[str],
        *,
        layer: Layer | None,
        chunked: bool,
        name: str = "",
    ) -> tuple[str, list[str]]:
        """Print steps as a method; its name, and the arguments it takes before the values."""
        assert self.body is not None
        place = len(self.methods)
        lines, extra, names = self.body(self, steps, arguments, returned, layer=layer, chunked=chunked)
        typed = ["self", *(["chunk: int"] if chunked else [])]
        typed += [f"{word}: int" if word == "draw" else f"{word}: Container" for word in extra]
        typed += [f"{names[value]}: {self._type(value)}" for value in arguments]
        if any(word != "draw" for word in extra):
            self.need("weft.runtime.program.module", {"Container"})
        types = [self._type(value) if not chunked else "Tensor" for value in returned]
        kinds = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"
        key = "\n".join([*typed, *lines])
        if key in self._texts:
            return self._texts[key], extra
        path = self._path(steps)
        name = self.method_name(name or (f"{path}_{kind}" if path else kind))
        self._texts[key] = name
        # before the methods that it calls
        self.methods.insert(place, [*statement(f"def {name}(", typed, f") -> {kinds}:", 1), *lines])
        return name, extra

    def method_name(self, base: str) -> str:
        """A method name that nothing else has."""
        name = free_name(legal(base), lambda name: name not in self.method_names and not hasattr(_a_program(), name))
        self.method_names.add(name)
        return name

    def _type(self, value: str) -> str:
        if value.startswith(INPUT):
            return "Tensor"
        parts = len(self.program.values[value].layout.grid.cells_on.get(self.ranks[0], ()))
        return "tuple[Tensor, ...]" if parts > 1 else "Tensor"

    def _path(self, steps: Sequence[Step]) -> str:
        """The module that all ops of some steps have in common, by its last name."""
        paths = [self.graph.by_name[step.op].path.split(".") for step in walk(steps) if isinstance(step, Compute)]
        common = [words[0] for words in zip(*paths, strict=False) if len(set(words)) == 1]
        named = [word for word in common if word and not word.isdigit()]
        return named[-1] if named else ""


def _direct(program: Program) -> set[str]:
    """Values that are stored tensors themselves. Of several uses of a parameter whose gradients go home by different
    ways only one can be, and of many only the first: gradients are added in the order of the uses."""
    unmoved = {step.value for step in walk(program.steps) if isinstance(step, Use) and not step.moves}
    others: set[str] = set()
    for sync in program.syncs:
        found = [source for source in sync.sources if source in unmoved]
        kept = found[:1] if len(sync.sources) <= 2 or found[:1] == list(sync.sources[:1]) else []
        others.update(name for name in found if name not in kept)
    return unmoved - others


def _requiring(graph: Graph) -> frozenset[str]:
    """Tensors that require a gradient when the program runs. Some need none, because backward never reaches them; an op
    in a `no_grad` region must not let them through."""
    found = {name for name, tensor in graph.tensors.items() if tensor.needs_grad}
    for op in graph.ops:
        if op.grad and op.target != "aten.detach.default" and not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _reads(steps: Sequence[Step], times: int) -> Counter[str]:
    """How often each value is read."""
    found: Counter[str] = Counter()
    for step in steps:
        if isinstance(step, Chunks | Recompute):
            found.update(_reads(step.body, 2 if isinstance(step, Chunks) else times))
        else:
            found.update({name: times * count for name, count in Counter(values_read(step)).items()})
    return found


def _equal_constants(graph: Graph) -> dict[str, str]:
    """For each constant the first one that is equal to it."""
    alike: dict[Hashable, list[str]] = {}
    found: dict[str, str] = {}
    for name, value in graph.constants.items():
        others = alike.setdefault((value.dtype, value.shape), [])
        found[name] = next((other for other in others if torch.equal(graph.constants[other], value)), name)
        others += [name] if found[name] == name else []
    return found


def input_names(program: Program, wanted: Mapping[str, str] | None = None) -> dict[str, str]:
    """The arguments of forward, by input tensor."""
    found: dict[str, str] = {}
    for one in program.graph.inputs:
        base = legal((wanted or {}).get(one.tensor, one.tensor))
        taken = {*found.values(), *RESERVED, *rt_moves.MOVES}
        found[one.tensor] = free_name(base, lambda name, taken=taken: name not in taken)  # type: ignore[misc]
    return found


def attribute(name: str) -> str:
    """A dotted name as it stands in the text behind what holds it: `.h[0].attn.weight` of `h.0.attn.weight`."""
    words = name.split(".")
    if not all(_is_plain(word) for word in words):
        return f".at({literal(name)})"
    return "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in words)


def _is_plain(word: str) -> bool:
    """True if a word can stand in the text, as an attribute or a number."""
    # Python mangles names that begin with two underscores, and normalises what is not ASCII
    found = re.fullmatch(r"(?!__)[A-Za-z_]\w*|0|[1-9]\d*", word, re.ASCII)
    return found is not None and not keyword.iskeyword(word) and not hasattr(_CONTAINER, word)


@cache
def _a_program() -> ParallelModule:
    """One that holds nothing: it has all attributes that any has."""
    return ParallelModule(SingleRank())
