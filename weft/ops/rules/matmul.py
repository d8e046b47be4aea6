"""Products of matrices: rule texts, and for einsum and tensordot rules built from their own letters.

In: an op and its shapes. Out: its rule. Contracted names are summed; a bias is added; a product is linear in each
factor together with what is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.ir.graph import Tensor
from weft.ops.arguments import integers, positive
from weft.ops.build import OpView, RuleOf, named, numbered_dims, rules_of
from weft.ops.rule import Dim, Dims, Rule, dim, fixed

_MATMUL = {
    (1, 1): "k+, k+ ->",
    (1, 2): "k+, b* k+ n -> b* n",
    (2, 1): "b* m k+, k+ -> b* m",
    (2, 2): "b* m k+, b* k+ n -> b* m n",
}
"""By the number of dims: vectors have no row or column, leading dims broadcast."""


def product(text: str, *linear: Sequence[int]) -> RuleOf:
    """The rule that a text says, and the sets of its operands in which the product is linear."""
    return lambda it: it.text(text, linear=linear, ones=True)


def matmul_rule(it: OpView) -> Rule:
    """matmul, in all forms."""
    left, right = (min(2, len(sizes)) for sizes in it.shapes)
    return it.text(_MATMUL[left, right], linear=((0,), (1,)), ones=True)


def linear_rule(it: OpView) -> Rule:
    """A weight of one dim makes one number per row."""
    vector = len(it.reads[it.where("weight")].sizes) == 1
    text = "b* k+, k+, & -> b*" if vector else "b* k+, n k+, &n -> b* n"
    return it.text(text, linear=((0, 2), (1, 2)), ones=True)


def einsum_rule(it: OpView) -> Rule:
    """The equation is the rule: letters that the output lacks are summed."""
    sides, result = _equation(str(it.args["equation"]), it.reads, len(it.result))
    sizes: dict[str, int] = {}
    for letters, tensor in zip((*sides, result), (*it.reads, *it.makes), strict=True):
        for letter, size in zip(letters, tensor.sizes, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    whole = {letter for letters in sides for letter in letters if letters.count(letter) > 1}

    def dims(letters: Sequence[str], tensor: Tensor) -> Dims:
        # a letter that stands twice in one operand takes a diagonal, which nobody may cut
        pairs = zip(letters, tensor.sizes, strict=True)
        return tuple(fixed(size) if letter in whole or size == 1 else dim(letter) for letter, size in pairs)

    inputs = [dims(letters, tensor) for letters, tensor in zip(sides, it.reads, strict=True)]
    linear = [[i] for i in range(len(inputs))]
    return it.rule(inputs, [dims(result, it.makes[0])], sizes=sizes, summed=set(sizes) - set(result), linear=linear)


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


def tensordot_rule(it: OpView) -> Rule:
    """The listed dims of both operands are summed in pairs; the rest stand side by side."""
    listed = [integers(it.args[name]) for name in ("dims_self", "dims_other")]
    return _contraction(it, listed, [f"k{i}" for i in range(len(listed[0]))])


def inner_rule(it: OpView) -> Rule:
    """The last dims of both operands are summed; a scalar multiplies."""
    if not all(it.shapes):
        dims = numbered_dims(it.result)
        return it.rule([dims if shape else () for shape in it.shapes], [dims], linear=[[0], [1]])
    return _contraction(it, [(-1,), (-1,)], ["k"])


def _contraction(it: OpView, listed: Sequence[Sequence[int]], names: Sequence[str]) -> Rule:
    """The listed dims of both operands have these names and are summed."""
    inputs: list[Dims] = []
    rest: list[Dim] = []
    for shape, dims in zip(it.shapes, listed, strict=True):
        summed = [positive(d, len(shape)) for d in dims]
        own: list[Dim] = []
        for i, size in enumerate(shape):
            if i in summed:
                own.append(named(names[summed.index(i)], size))
            else:
                own.append(named(f"d{len(rest)}", size))
                rest.append(own[-1])
        inputs.append(tuple(own))
    return it.rule(inputs, [tuple(rest)], summed=names, linear=[[0], [1]])


RULES: Mapping[str, RuleOf] = {
    "aten.linear": linear_rule,
    **rules_of(matmul_rule, "matmul linalg_matmul"),
    "aten.bilinear": product("b* i+, b* j+, n i+ j+, &n -> b* n", (0, 3), (1, 3), (2, 3)),
    "aten.mm": product("m k+, k+ n -> m n", (0,), (1,)),
    "aten.bmm": product("b m k+, b k+ n -> b m n", (0,), (1,)),
    "aten.mv": product("m k+, k+ -> m", (0,), (1,)),
    **rules_of(product("k+, k+ ->", (0,), (1,)), "dot vdot"),
    **rules_of(product("m, n -> m n", (0,), (1,)), "outer ger"),
    "aten.addmm": product("&m n, m k+, k+ n -> m n", (0, 1), (0, 2)),
    "aten.addmv": product("&m, m k+, k+ -> m", (0, 1), (0, 2)),
    "aten.addr": product("&m n, m, n -> m n", (0, 1), (0, 2)),
    "aten.baddbmm": product("&b m n, b m k+, b k+ n -> b m n", (0, 1), (0, 2)),
    "aten.addbmm": product("&m n, b+ m k+, b+ k+ n -> m n", (0, 1), (0, 2)),
    "aten.cdist": product("b* m k^, b* n k^ -> b* m n"),
    "aten.einsum": einsum_rule,
    "aten.tensordot": tensordot_rule,
    "aten.inner": inner_rule,
}
"""Rules by operator."""
