"""Rule text: read into a Template once, fitted to the shapes of one op each time.

In: `b* k+, n k+, &n -> b* n` (the grammar stands in `rule.py`). Out: a Template, and from it a Rule for given shapes.
Promised: a Template never names an unsummed name that an output lacks, nor one name twice in an operand; a shape
that does not fit is refused with the text and a caret under the fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from weft.errors import RuleError
from weft.ir.graph import Tensor
from weft.ops.rule import Dim, Dims, Factor, Rule, dim, fixed, linear_sets
from weft.runtime.operators.algorithms import Exchange

_TOKEN = re.compile(r"\s*(->|[A-Za-z_][A-Za-z_0-9]*|[0-9]+|[,&()*+^!]|\S|$)")
_ENDS = frozenset({",", "->", ""})
_MARKS = {"+": "summed", "^": "frozen", "!": "algorithm"}
_UNNAMED = "_"


@dataclass(frozen=True)
class TemplateDim:
    """One dim of a template: its factors, or any number of dims of that name (`several`)."""

    factors: tuple[Factor, ...]
    several: bool
    column: int


@dataclass(frozen=True)
class TemplateOperand:
    """One operand: its dims, and whether it is added to the result."""

    dims: tuple[TemplateDim, ...]
    added: bool
    column: int

    @property
    def several(self) -> int | None:
        """Position of the `name*` dim."""
        return next((i for i, one in enumerate(self.dims) if one.several), None)

    @property
    def names(self) -> Iterator[tuple[str, int]]:
        """The names that stand in it, and where in the text."""
        for one in self.dims:
            yield from ((f, one.column) for f in one.factors if isinstance(f, str) and f != _UNNAMED)


@dataclass(frozen=True)
class Template:
    """Rule text, read."""

    text: str
    inputs: tuple[TemplateOperand, ...]
    outputs: tuple[TemplateOperand, ...]
    marks: Mapping[str, str] = field(default_factory=dict)

    def marked(self, kind: str) -> frozenset[str]:
        return frozenset(name for name, mark in self.marks.items() if mark == kind)


@dataclass(frozen=True)
class _Token:
    text: str
    column: int


def fault(text: str, column: int, message: str) -> RuleError:
    """An error that points into rule text."""
    return RuleError(f"{message}\n  {text}\n  {' ' * column}^", remedy="see weft/ops/rule.py for the grammar of rules")


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while True:
        match = _TOKEN.match(text, at)
        assert match is not None
        yield _Token(match[1], match.start(1))
        if not match[1]:
            return
        at = match.end()


class _Reader:
    """Recursive descent over the tokens of one rule text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.marks: dict[str, str] = {}

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def template(self) -> Template:
        inputs = self.operands() if self.next.text != "->" else ()
        if self.next.text != "->":
            raise fault(self.text, self.next.column, "a rule needs '->' between its operands and its outputs")
        self.take()
        outputs = self.operands()
        if self.next.text:
            raise fault(self.text, self.next.column, f"unexpected {self.next.text!r} in a rule")
        return Template(self.text, inputs, outputs, self.marks)

    def operands(self) -> tuple[TemplateOperand, ...]:
        found = [self.operand()]
        while self.next.text == ",":
            self.take()
            found.append(self.operand())
        return tuple(found)

    def operand(self) -> TemplateOperand:
        column = self.next.column
        added = self.next.text == "&"
        if added:
            self.take()
        dims: list[TemplateDim] = []
        while self.next.text not in _ENDS:
            dims.append(self.dim())
        operand = TemplateOperand(tuple(dims), added, column)
        self.no_doubles(operand)
        return operand

    def dim(self) -> TemplateDim:
        column = self.next.column
        if self.next.text == "(":
            self.take()
            factors: list[Factor] = []
            while self.next.text != ")":
                if self.next.text in _ENDS:
                    raise fault(self.text, column, "this '(' is not closed")
                if self.next.text == _UNNAMED:
                    raise fault(
                        self.text, self.next.column, "'_' is a dim of its own: give this factor a name or a size"
                    )
                factors.append(self.factor())
            self.take()
            return TemplateDim(tuple(factors), False, column)
        factor = self.factor()
        if self.next.text == "*" and isinstance(factor, str):
            self.take()
            self.mark(factor)
            return TemplateDim((factor,), True, column)
        return TemplateDim(() if factor == 1 else (factor,), False, column)

    def factor(self) -> Factor:
        token = self.take()
        if token.text.isdigit():
            return int(token.text)
        if not token.text.isidentifier():
            raise fault(self.text, token.column, f"expected a dim, found {token.text or 'the end'!r}")
        self.mark(token.text)
        return token.text

    def mark(self, name: str) -> None:
        if self.next.text in _MARKS and name != _UNNAMED:
            token = self.take()
            kind = _MARKS[token.text]
            if self.marks.setdefault(name, kind) != kind:
                raise fault(self.text, token.column, f"{name!r} is marked both {self.marks[name]} and {kind}")

    def no_doubles(self, operand: TemplateOperand) -> None:
        seen: set[str] = set()
        for name, column in operand.names:
            if name in seen:
                raise fault(self.text, column, f"{name!r} stands twice in one operand")
            seen.add(name)
        if sum(one.several for one in operand.dims) > 1:
            raise fault(self.text, operand.column, "an operand may hold one 'name*' only")


@cache
def parse(text: str) -> Template:
    """Read rule text.

    >>> parse("b* k+, n k+, &n -> b* n").marks
    {'k': 'summed'}
    """
    template = _Reader(text).template()
    for operand in template.outputs:
        if operand.added:
            raise fault(text, operand.column, "only operands can be added ('&'), not outputs")
    for operand in (*template.inputs, *template.outputs):
        for name, column in operand.names:
            _refuse_odd_mark(template, name, column)
    return template


def _refuse_odd_mark(template: Template, name: str, column: int) -> None:
    """What some output lacks is summed or frozen; what every output has, nobody sums away."""
    everywhere = all(any(name in one.factors for one in output.dims) for output in template.outputs)
    mark = template.marks.get(name)
    if mark is None and not everywhere:
        raise fault(
            template.text, column, f"{name!r} is not in every output: mark it {name}+ (summed) or {name}^ (frozen)"
        )
    if mark == "summed" and everywhere:
        raise fault(template.text, column, f"{name!r} is in every output, so it is not summed away: leave out its '+'")


@dataclass(frozen=True)
class Fitted:
    """How a template's `name*` dims and sizes came out for given shapes."""

    sizes: Mapping[str, int]
    several: Mapping[str, tuple[int, ...]]
    small: Mapping[str, int]
    """What would be names of size 0 or 1, if such were kept."""

    def factor(self, factor: Factor) -> Factor:
        """A name as it stands in the rule: its size where it is not kept."""
        return self.small.get(factor, factor) if isinstance(factor, str) else factor


def instantiate(
    template: Template,
    reads: Sequence[Tensor],
    makes: Sequence[Tensor],
    *,
    present: Sequence[int | None] | None = None,
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    algorithms: Mapping[str, Exchange] | Exchange | None = None,
    ones: bool = True,
) -> Rule:
    """The rule of one op.

    Args:
        present: for each operand of the template its position among the op's inputs, None where it was left out;
            by default operand i is input i.
        sizes: sizes of names that the shapes do not tell.
        linear: sets of template operands.
        algorithms: what is exchanged along the names marked `!`; the same along all of them if it is one Exchange.
        ones: names of size 1 or 0, along which nothing can be cut, stay names.
    """
    positions = list(range(len(reads))) if present is None else list(present)
    if len(positions) != len(template.inputs):
        raise fault(template.text, 0, f"the rule has {len(template.inputs)} operands, the operator {len(positions)}")
    if len(makes) != len(template.outputs):
        raise fault(template.text, 0, f"the rule has {len(template.outputs)} outputs, the operator {len(makes)}")
    held = [(template.inputs[t], reads[i], i) for t, i in enumerate(positions) if i is not None]
    pairs = [(operand, tensor) for operand, tensor, _ in held] + list(zip(template.outputs, makes, strict=True))
    fitted = _fit(template, pairs, sizes or {}, ones)
    inputs = {i: _dims(template, operand, tensor, fitted) for operand, tensor, i in held}
    outputs = tuple(_dims(template, o, t, fitted) for o, t in zip(template.outputs, makes, strict=True))
    order = {t: i for t, i in enumerate(positions) if i is not None}
    sets = [[order[t] for t in one if t in order] for one in linear]
    talking = _spread(template.marked("algorithm"), fitted)
    exchanges = dict.fromkeys(talking, algorithms) if isinstance(algorithms, Exchange) else algorithms or {}
    return Rule(
        inputs=tuple(inputs[i] for i in range(len(reads))),
        outputs=outputs,
        sizes=fitted.sizes,
        summed=_spread(template.marked("summed"), fitted),
        frozen=_spread(template.marked("frozen"), fitted),
        algorithms={name: exchanges[name] for name in sorted(talking)},
        added=frozenset(i for t, i in order.items() if template.inputs[t].added),
        linear=linear_sets(sets, reads, makes),
    )


def _spread(names: frozenset[str], fitted: Fitted) -> frozenset[str]:
    """Names with `name*` replaced by its dims."""
    found: set[str] = set()
    for name in names:
        if name in fitted.several:
            found.update(f"{name}{i}" for i in range(len(fitted.several[name])))
        else:
            found.add(name)
    return frozenset(name for name in found if name in fitted.sizes)


def _spans(
    template: Template, operand: TemplateOperand, shape: Sequence[int]
) -> list[tuple[TemplateDim, tuple[int, ...]]]:
    """Each template dim with the sizes it covers. An added operand may lack leading dims: it broadcasts."""
    at = operand.several
    dims = operand.dims
    if operand.added and at is None and len(shape) < len(dims):
        dims = dims[len(dims) - len(shape) :]
    fixed = len(dims) - (at is not None)
    if len(shape) < fixed or (at is None and len(shape) != fixed):
        raise fault(template.text, operand.column, f"a tensor of shape {tuple(shape)} does not fit here")
    covered: list[tuple[int, ...]] = [(size,) for size in shape]
    if at is not None:
        stop = len(shape) - (len(dims) - at - 1)
        covered[at:stop] = [tuple(shape[at:stop])]
    return list(zip(dims, covered, strict=True))


def _fit(
    template: Template, pairs: Sequence[tuple[TemplateOperand, Tensor]], known: Mapping[str, int], ones: bool
) -> Fitted:
    """Sizes of all names."""
    sizes = dict(known)
    several: dict[str, tuple[int, ...]] = {}
    composite: list[tuple[TemplateDim, int]] = []
    for operand, tensor in pairs:
        for one, covered in _spans(template, operand, tensor.sizes):
            spread = operand.added and not one.several and covered[0] == 1
            if one.factors == (_UNNAMED,) or spread:
                continue
            if one.several:
                name = str(one.factors[0])
                several[name] = _broadcast(template, one, several.get(name, ()), covered)
            elif len(one.factors) == 1:
                _bind(template, one, sizes, covered[0])
            else:
                composite.append((one, covered[0]))
    for _ in composite:  # each round solves at least one product that has one unknown
        for one, size in composite:
            _solve(template, one, sizes, size)
    for one, size in composite:
        if any(isinstance(f, str) and f not in sizes for f in one.factors):
            raise fault(template.text, one.column, "the shapes do not tell the sizes of these factors")
        if math.prod(sizes[f] if isinstance(f, str) else f for f in one.factors) != size:
            raise fault(template.text, one.column, f"these factors do not make {size}")
    for name, covered in several.items():
        sizes.update((f"{name}{i}", size) for i, size in enumerate(covered) if size != 1)
    small = {} if ones else {name: size for name, size in sizes.items() if size < 2}
    return Fitted({name: size for name, size in sizes.items() if name not in small}, several, small)


def _bind(template: Template, one: TemplateDim, sizes: dict[str, int], size: int) -> None:
    (factor,) = one.factors
    expected = sizes.setdefault(factor, size) if isinstance(factor, str) else factor
    if expected != size:
        raise fault(template.text, one.column, f"{factor!r} is {expected} elsewhere and {size} here")


def _solve(template: Template, one: TemplateDim, sizes: dict[str, int], size: int) -> None:
    unknown = [f for f in one.factors if isinstance(f, str) and f not in sizes]
    if len(unknown) != 1:
        return
    others = math.prod(sizes[f] if isinstance(f, str) else f for f in one.factors if f != unknown[0])
    if others == 0 or size % others:
        raise fault(template.text, one.column, f"{size} is not a multiple of {others}")
    sizes[unknown[0]] = size // others


def _broadcast(
    template: Template, one: TemplateDim, found: tuple[int, ...], covered: tuple[int, ...]
) -> tuple[int, ...]:
    """The common shape of a `name*`, from the right."""
    length = max(len(found), len(covered))
    left, right = ((1,) * (length - len(side)) + side for side in (found, covered))
    for a, b in zip(left, right, strict=True):
        if a != b and 1 not in (a, b):
            raise fault(template.text, one.column, f"{one.factors[0]}* is {found} elsewhere and {covered} here")
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


def _dims(template: Template, operand: TemplateOperand, tensor: Tensor, fitted: Fitted) -> Dims:
    found: list[Dim] = []
    for one, covered in _spans(template, operand, tensor.sizes):
        if one.factors == (_UNNAMED,):
            found.extend(map(fixed, covered))
        elif one.several:
            name = str(one.factors[0])
            start = len(fitted.several[name]) - len(covered)
            names = (f"{name}{start + i}" for i in range(len(covered)))
            found.extend(
                fixed(1) if size == 1 else dim(fitted.factor(n)) for n, size in zip(names, covered, strict=True)
            )
        elif operand.added and covered[0] == 1:
            found.append(dim())
        else:
            found.append(dim(*(f for f in map(fitted.factor, one.factors) if f != 1)))
    return tuple(found)
