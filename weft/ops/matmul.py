"""Products of matrices: rows of the table, and texts that depend on the shapes.

In: an op and its shapes. Out: rule text, or for einsum and tensordot a rule built from their own letters. Contracted
names are summed; a bias is added; a product is linear in each factor together with what is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, integers
from weft.ops.build import build, fixed, named
from weft.ops.rule import Dim, Dims, Rule, RuleOf, dim

Text = str | Callable[[Op, tuple[Tensor, ...]], str]


@dataclass(frozen=True)
class Row:
    """One operator: its rule text (or how to choose it), and the sets of operands in which it is linear."""

    text: Text
    linear: tuple[tuple[int, ...], ...] = ()


def matmul_text(op: Op, reads: tuple[Tensor, ...]) -> str:
    """Vectors have no row or column dim; leading dims broadcast."""
    left, right = (len(tensor.sizes) for tensor in reads)
    if left == 1 and right == 1:
        return "k+, k+ ->"
    if left == 1:
        return "k+, b* k+ n -> b* n"
    if right == 1:
        return "b* m k+, k+ -> b* m"
    return "b* m k+, b* k+ n -> b* m n"


def linear_text(op: Op, reads: tuple[Tensor, ...]) -> str:
    """A weight of one dim makes one number per row."""
    return "b* k+, k+, & -> b*" if len(reads[1].sizes) == 1 else "b* k+, n k+, &n -> b* n"


ROWS: Mapping[str, Row] = {
    "aten.linear": Row(linear_text, ((0, 2), (1, 2))),
    "aten.bilinear": Row("b* i+, b* j+, n i+ j+, &n -> b* n", ((0, 3), (1, 3), (2, 3))),
    "aten.mm": Row("m k+, k+ n -> m n", ((0,), (1,))),
    "aten.bmm": Row("b m k+, b k+ n -> b m n", ((0,), (1,))),
    "aten.matmul": Row(matmul_text, ((0,), (1,))),
    "aten.linalg_matmul": Row(matmul_text, ((0,), (1,))),
    "aten.mv": Row("m k+, k+ -> m", ((0,), (1,))),
    "aten.dot": Row("k+, k+ ->", ((0,), (1,))),
    "aten.vdot": Row("k+, k+ ->", ((0,), (1,))),
    "aten.outer": Row("m, n -> m n", ((0,), (1,))),
    "aten.ger": Row("m, n -> m n", ((0,), (1,))),
    "aten.addmm": Row("&m n, m k+, k+ n -> m n", ((0, 1), (0, 2))),
    "aten.addmv": Row("&m, m k+, k+ -> m", ((0, 1), (0, 2))),
    "aten.addr": Row("&m n, m, n -> m n", ((0, 1), (0, 2))),
    "aten.baddbmm": Row("&b m n, b m k+, b k+ n -> b m n", ((0, 1), (0, 2))),
    "aten.addbmm": Row("&m n, b+ m k+, b+ k+ n -> m n", ((0, 1), (0, 2))),
    "aten.cdist": Row("b* m k^, b* n k^ -> b* m n"),
}
"""One row per operator."""


def einsum_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The equation is the rule: letters that the output lacks are summed."""
    sides, result = _equation(str(arguments(op)["equation"]), reads, len(makes[0].sizes))
    sizes: dict[str, int] = {}
    for letters, tensor in zip((*sides, result), (*reads, *makes), strict=True):
        for letter, size in zip(letters, tensor.sizes, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    whole = {letter for letters in sides for letter in letters if letters.count(letter) > 1}

    def dims(letters: Sequence[str], tensor: Tensor) -> Dims:
        # a letter that stands twice in one operand takes a diagonal, which nobody may cut
        pairs = zip(letters, tensor.sizes, strict=True)
        return tuple(fixed(size) if letter in whole or size == 1 else dim(letter) for letter, size in pairs)

    return build(
        [dims(letters, tensor) for letters, tensor in zip(sides, reads, strict=True)],
        [dims(result, makes[0])],
        reads,
        makes,
        sizes=sizes,
        summed=set(sizes) - set(result),
        linear=[[i] for i in range(len(reads))],
    )


def _equation(equation: str, reads: Sequence[Tensor], num_out: int) -> tuple[list[list[str]], list[str]]:
    """Letters of each operand and of the output; the dims of an ellipsis are `e0 e1 ...`, counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    sides = [_letters(text, len(tensor.sizes)) for text, tensor in zip(texts, reads, strict=True)]
    if arrow:
        return sides, _letters(right, num_out)
    plain = [letter for letters in sides for letter in letters if len(letter) == 1]
    once = sorted(letter for letter in set(plain) if plain.count(letter) == 1)
    return sides, [*_ellipsis(num_out - len(once)), *once]


def _letters(text: str, num_dims: int) -> list[str]:
    before, dots, after = text.partition("...")
    return [*before, *_ellipsis(num_dims - len(before) - len(after)), *after] if dots else list(before)


def _ellipsis(count: int) -> list[str]:
    return [f"e{i}" for i in reversed(range(count))]


def tensordot_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The listed dims of both operands are summed in pairs; the rest stand side by side."""
    values = arguments(op)
    sides = [list(integers(values[name])) for name in ("dims_self", "dims_other")]
    pairs = [[i % len(tensor.sizes) for i in dims] for dims, tensor in zip(sides, reads, strict=True)]
    inputs: list[list[Dim]] = []
    rest: list[Dim] = []
    for tensor, summed in zip(reads, pairs, strict=True):
        own: list[Dim] = []
        for i, size in enumerate(tensor.sizes):
            if i in summed:
                own.append(named(f"k{summed.index(i)}", size))
            else:
                own.append(named(f"d{len(rest)}", size))
                rest.append(own[-1])
        inputs.append(own)
    summed_names = {name for one in inputs[0] for name in one.names if name.startswith("k")}
    linear = [[0], [1]]
    return build(list(map(tuple, inputs)), [tuple(rest)], reads, makes, summed=summed_names, linear=linear)


def inner_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The last dims of both operands are summed; a scalar multiplies."""
    if not reads[0].sizes or not reads[1].sizes:
        shape = makes[0].sizes
        dims = tuple(named(f"d{i}", size) for i, size in enumerate(shape))
        return build([dims if t.sizes else () for t in reads], [dims], reads, makes, linear=[[0], [1]])
    left, right = (tensor.sizes[:-1] for tensor in reads)
    rest = [named(f"d{i}", size) for i, size in enumerate((*left, *right))]
    k = named("k", reads[0].sizes[-1])
    inputs = [(*rest[: len(left)], k), (*rest[len(left) :], k)]
    return build(inputs, [tuple(rest)], reads, makes, summed=k.names, linear=[[0], [1]])


PRODUCTS: Mapping[str, RuleOf] = {
    "aten.einsum": einsum_rule,
    "aten.tensordot": tensordot_rule,
    "aten.inner": inner_rule,
}
"""Computed rules, by family."""
