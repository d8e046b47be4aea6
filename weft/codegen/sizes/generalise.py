"""Programs of one shape at several sizes -> one program for all sizes.

In: the files of the same module under the same plan, emitted at several samples of its free sizes. Out: the files with
every number that differs said as an expression over the sizes, which forward reads off its inputs; tables that differ
hold expressions, worked out when they are asked for. Promised: at every sample the program says the numbers it was
given there; a number that no expression gives is an error that names its line, never a guess.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from weft.codegen.sizes.affine import Expression, Sample, fit, fit_quotient
from weft.codegen.sizes.logical import Line, is_number, logical_lines, shape_of, tokens
from weft.codegen.tables import tables_text
from weft.codegen.text import TAB, top_level
from weft.errors import PlanError
from weft.runtime.program.files import PARTS
from weft.runtime.program.sizes import SIZE

REMEDY = "leave that dim unmarked in the example, or choose another plan"
METHOD = re.compile(r"def (\w+)\(")
SLICE = re.compile(r"(?<=[\w)\]])\[[^\[\]]*:[^\[\]]*\]")
Piece = str | Expression
"""Text as it is, or an expression in its place."""


@dataclass(frozen=True)
class Home:
    """Where forward reads sizes: an input, as forward calls it, and the name of each of its dims, "" for others."""

    argument: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class General:
    """Files for all sizes. `steps`: each size must be congruent to the example's modulo its step."""

    files: Mapping[str, bytes]
    steps: Mapping[str, int]


Files = Mapping[str, bytes]


def form(files: Files) -> Any:
    """Equal for files that differ in numbers only."""
    texts = tuple((name, shape_of(logical_lines(_text(files, name)))) for name in sorted(_programs(files)))
    return texts, _masked(json.loads(files[PARTS]))


def _masked(value: Any) -> Any:
    match value:
        case dict():
            return tuple((key, _masked(one)) for key, one in value.items())
        case list():
            return tuple(map(_masked, value))
        case bool() | str() | None:
            return value
    return 0


def generalise(
    found: Sequence[Files],
    samples: Sequence[Sample],
    homes: Sequence[Home],
    moduli: Mapping[str, int],
    cuts: Sequence[Sequence[int]] = (),
) -> General:
    """One program for all sizes.

    Args:
        found: files of equal form, one for each of the samples.
        homes: where forward reads each size.
        moduli: the samples agree modulo these.
        cuts: lengths of all parts, for each of the samples: sizes must let them be so whether or not the text says it.
    """
    fitting = Fitting(samples, moduli)
    for lengths in zip(*cuts, strict=True):
        fitting.number(lengths, "the parts of a tensor")
    parts = _general([json.loads(files[PARTS]) for files in found], fitting, PARTS)
    sized = {(section, key) for section in ("here", "moves") for key, table in parts[section].items() if _holds(table)}
    bodies = {
        name: [
            _general_line(lines, fitting) for lines in zip(*(logical_lines(_text(f, name)) for f in found), strict=True)
        ]
        for name in _programs(found[0])
    }
    steps = fitting.steps()
    even = {name: step if not samples[0][name] % step else 1 for name, step in steps.items()}
    texts = {
        name: Writer(lines, even, tuple(samples[0]), sized, homes).text().encode() for name, lines in bodies.items()
    }
    for section, key in sized:
        if section == "moves" and any(f'Table("{key}")' in content.decode() for content in texts.values()):
            raise PlanError(f"how the table {key} of stored tensors looks depends on a marked size", remedy=REMEDY)
    tables = {PARTS: _parts_text(parts, tuple(samples[0]) if sized else (), even).encode()}
    return General({**found[0], **texts, **tables}, steps)


def _programs(files: Files) -> list[str]:
    return [name for name in files if name.endswith(".py")]


def _text(files: Files, name: str) -> str:
    return files[name].decode()


class Fitting:
    """Expressions for numbers, each found once."""

    def __init__(self, samples: Sequence[Sample], moduli: Mapping[str, int]) -> None:
        self._samples, self._moduli = samples, moduli
        self._common = math.prod(moduli.values()) ** 2
        self._known: dict[tuple[int, ...], Expression | None] = {}

    def number(self, values: Sequence[int], place: str) -> int | Expression:
        """The number, or the expression that gives it."""
        key = tuple(values)
        if len(set(key)) == 1:
            return key[0]
        if key not in self._known:
            self._known[key] = fit(key, self._samples, self._common)
        found = self._known[key]
        if found is None:
            raise self._no_rule(key, place)
        return found

    def token(self, values: Sequence[str], place: str) -> Piece:
        """The same for numbers as they stand in a text."""
        if len(set(values)) == 1:
            return values[0]
        if all(value.isdigit() for value in values):
            found = self.number(list(map(int, values)), place)
            return found if isinstance(found, Expression) else str(found)
        text = fit_quotient(list(map(float, values)), self._samples)
        if text is None:
            raise self._no_rule(values, place)
        return f"({text})"

    def _no_rule(self, values: Sequence[Any], place: str) -> PlanError:
        told = "; ".join(
            f"{value} at {', '.join(f'{name}={size}' for name, size in sample.items())}"
            for value, sample in zip(values, self._samples, strict=True)
        )
        what = f"a number of the program follows no rule over the marked sizes: {told}"
        return PlanError(what, place=place, remedy=REMEDY)

    def steps(self) -> dict[str, int]:
        """Modulo what each size must be as in the example, so that every division comes out even."""
        steps = dict.fromkeys(self._samples[0], 1)
        found = sorted((one for one in self._known.values() if one is not None), key=lambda one: len(one.names))
        for one in found:
            if one.divisor == 1 or self._comes_out(one, steps):
                continue
            for name in one.names:
                wider = math.lcm(steps[name], one.divisor)
                steps[name] = math.gcd(wider, self._moduli[name]) if len(one.names) > 1 else wider
            if not self._comes_out(one, steps):
                raise PlanError(f"{one.text({})} is no whole number at all sizes that the plan serves", remedy=REMEDY)
        return steps

    def _comes_out(self, one: Expression, steps: Mapping[str, int]) -> bool:
        names = sorted(one.names)
        base = self._samples[0]
        return all(
            one.numerator({name: base[name] + steps[name] * k for name, k in zip(names, found, strict=True)})
            % one.divisor
            == 0
            for found in product(range(one.divisor), repeat=len(names))
        )


@dataclass(frozen=True)
class Draft:
    """A line whose sizes are not yet said. `code` None: as it stood."""

    line: Line
    code: tuple[Piece, ...] | None
    comment: tuple[Piece, ...]


def _general_line(lines: Sequence[Line], fitting: Fitting) -> Draft:
    first = lines[0]
    place = first.code or first.comment
    code = _aligned([line.code for line in lines], fitting, place)
    comment: tuple[Piece, ...] = ()
    if first.code and all(line.comment for line in lines):
        words = [tokens(line.comment) for line in lines]
        if len({len(one) for one in words}) == 1:
            comment = _aligned([line.comment for line in lines], fitting, place)
    same = all(isinstance(piece, str) for piece in (*code, *comment)) and len({line.rows for line in lines}) == 1
    return Draft(first, None if same else code, comment)


def _aligned(texts: Sequence[str], fitting: Fitting, place: str) -> tuple[Piece, ...]:
    columns = zip(*map(tokens, texts), strict=True)
    return tuple(fitting.token(column, place) if is_number(column[0]) else column[0] for column in columns)


def _general(values: Sequence[Any], fitting: Fitting, place: str) -> Any:
    """Tables with expressions where they differ."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _general([value[key] for value in values], fitting, f"{place} {key}") for key in first}
    if isinstance(first, list):
        return [_general(column, fitting, place) for column in zip(*values, strict=True)]
    if isinstance(first, int) and not isinstance(first, bool):
        return fitting.number(values, place)
    assert all(value == first for value in values), f"{place}: {values}"
    return first


def _holds(table: Any) -> bool:
    if isinstance(table, dict | list):
        return any(map(_holds, table.values() if isinstance(table, dict) else table))
    return isinstance(table, Expression)


def _parts_text(parts: Mapping[str, Any], names: tuple[str, ...], even: Mapping[str, int]) -> str:
    sizes = [f" {json.dumps('sizes')}: {json.dumps(names)}"] if names else []
    return tables_text(parts, sizes, lambda value: {SIZE: value.text(even)})


class Writer:
    """Says the sizes of one file: bound at the top of forward, handed on to the methods that need them."""

    def __init__(
        self,
        drafts: Sequence[Draft],
        even: Mapping[str, int],
        names: tuple[str, ...],
        sized: set[tuple[str, str]],
        homes: Sequence[Home],
    ) -> None:
        self._even, self._names, self._sized, self._homes = even, names, sized, homes
        taken = {word for draft in drafts for word in tokens(draft.line.code)} & set(names)
        assert not taken, f"the program means something else by {', '.join(taken)}"
        self._lines = [self._said(draft) for draft in drafts]
        self._methods = self._method_rows()
        self._needs = self._needed()

    def text(self) -> str:
        """The file."""
        rows: list[str] = []
        method = ""
        for line in self._lines:
            if found := METHOD.match(line.code):
                method = found.group(1)
            rows += self._handing_on(line, method)
            if found and method == "forward":
                rows += self._bound()
        return "\n".join(rows) + "\n"

    def _said(self, draft: Draft) -> Line:
        line = draft.line
        code = line.code if draft.code is None else self._expressed(draft.code)
        code = self._looked_up(code)
        if draft.code is None and code == line.code:
            return line
        comment = self._expressed(draft.comment, bare=True) or ("" if line.code else line.comment)
        return replace(line, code=code, comment=comment, rows=())

    def _expressed(self, pieces: Sequence[Piece], *, bare: bool = False) -> str:
        out = ""
        for i, piece in enumerate(pieces):
            if isinstance(piece, str):
                out += piece
                continue
            text = piece.text(self._even)
            after = next((one for one in pieces[i + 1 :] if not isinstance(one, str) or one.strip()), ")")
            alone = (out.rstrip() or "(")[-1] in "([{,:=" and isinstance(after, str) and after[0] in ")]},:"
            out += text if bare or alone or text.isidentifier() else f"({text})"
        return out if bare else SLICE.sub(_spaced, out)

    def _looked_up(self, code: str) -> str:
        """Tables that depend on sizes are asked for with the sizes."""
        sizes = ", ".join(self._names)
        for section, key in self._sized:
            if section == "here":
                code = re.sub(rf"self\.here\.{re.escape(key)}\b", f'self.sized("{key}", {sizes})', code)
            elif "self.comm.move(" in code or "self.comm.use_parts(" in code:
                code = code.replace(f', "{key}")', f', self.sized_move("{key}", {sizes}))')
        return code

    def _method_rows(self) -> dict[str, list[Line]]:
        found: dict[str, list[Line]] = {}
        method = ""
        for line in self._lines:
            if match := METHOD.match(line.code):
                method = match.group(1)
            elif method:
                found.setdefault(method, []).append(line)
        return found

    def _needed(self) -> dict[str, tuple[str, ...]]:
        """The sizes that each method needs, for itself or for those that it calls."""
        words = {name: {word for line in lines for word in tokens(line.code)} for name, lines in self._methods.items()}
        needs = {name: {size for size in self._names if size in found} for name, found in words.items()}
        calls = {
            name: {
                other
                for other in self._methods
                if other != "forward" and any(f"self.{other}" in line.code for line in lines) and other in words[name]
            }
            for name, lines in self._methods.items()
        }
        for _ in self._methods:
            for name, others in calls.items():
                needs[name] |= {size for other in others for size in needs[other]}
        return {name: tuple(size for size in self._names if size in found) for name, found in needs.items()}

    def _handing_on(self, line: Line, method: str) -> list[str]:
        code = line.code
        if METHOD.match(code):
            needed = [f"{size}: int" for size in self._needs.get(method, ())] if method != "forward" else []
            if needed:
                head = re.match(r"def \w+\(self(, chunk: int)?", code)
                assert head is not None, code
                code = f"{head.group(0)}, {', '.join(needed)}{code[head.end() :]}"
        else:
            for name, needed_there in self._needs.items():
                if needed_there and name != "forward":
                    code = _given(code, name, ", ".join(needed_there))
        if code != line.code or (not line.rows and code):
            return replace(line, code=code).laid_out()
        return list(line.rows)

    def _bound(self) -> list[str]:
        """Sizes read off the inputs."""
        needed = self._needs.get("forward", ())
        rows = []
        for home in self._homes:
            names = [name if name in needed else "_" for name in home.names]
            if any(name != "_" for name in names):
                targets = ", ".join(names) if len(names) > 1 else f"({names[0]},)"
                rows.append(f"{TAB * 2}{targets} = {home.argument}.shape")
        return rows


def _spaced(found: re.Match[str]) -> str:
    """A subscript with space around the colons of slices between expressions, as formatters have it."""
    items = []
    for item in top_level(found.group(0)[1:-1]):
        ends = [end.strip() for end in item.split(":")]
        wide = any(end and not re.fullmatch(r"-?\w+", end) for end in ends)
        items.append(" : ".join(ends).strip() if wide else item)
    return f"[{', '.join(items)}]"


def _given(code: str, method: str, sizes: str) -> str:
    """A call of a method, or of a function that is given the method, with sizes as its first arguments."""
    code = re.sub(rf"\bself\.{method}\((?=\))", f"self.{method}({sizes}", code)
    code = re.sub(rf"\bself\.{method}\((?!{re.escape(sizes)})", f"self.{method}({sizes}, ", code)
    return re.sub(rf"\bself\.{method}(?=[,)])", f"self.{method}, {sizes}", code)
