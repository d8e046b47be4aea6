"""Rule text: what it reads as, how it fits shapes, and where the caret points when it does not."""

from __future__ import annotations

import pytest
import torch

from weft.errors import RuleError
from weft.ir.graph import Tensor
from weft.ops.grammar import instantiate, parse
from weft.ops.rule import Rule
from weft.runtime.operators.algorithms import Exchange


def _fit(text: str, reads: list[tuple[int, ...]], makes: list[tuple[int, ...]], **more: object) -> Rule:
    sides = [[Tensor(f"t{i}", shape, torch.float64) for i, shape in enumerate(side)] for side in (reads, makes)]
    return instantiate(parse(text), sides[0], sides[1], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reads", "makes", "shown"),
    [
        ("b* k+, n k+, &n -> b* n", [(2, 3, 4), (6, 4), (6,)], [(2, 3, 6)], "b0 b1 k+, n k+, &n -> b0 b1 n"),
        ("b* k+, n k+, &n -> b* n", [(4,), (6, 4), (6,)], [(6,)], "k+, n k+, &n -> n"),
        ("a* m, a* m -> a* m", [(5, 1, 3), (4, 3)], [(5, 4, 3)], "a0 1 m, a1 m -> a0 a1 m"),
        ("&m n, m k+, k+ n -> m n", [(1, 6), (3, 4), (4, 6)], [(3, 6)], "&1 n, m k+, k+ n -> m n"),
        ("&m n, m k+, k+ n -> m n", [(), (3, 4), (4, 6)], [(3, 6)], "&, m k+, k+ n -> m n"),
        ("b (h d), h -> b h d", [(2, 12), (3,)], [(2, 3, 4)], "b (h d), h -> b h d"),
        ("b s^ 1 -> b 2", [(4, 3, 1)], [(4, 2)], "b s^ 1 -> b 2"),
        ("x! y -> y", [(4, 3)], [(3,)], "x! y -> y"),
        ("-> a b", [], [(2, 3)], " -> a b"),
        ("k+, k+ ->", [(4,), (4,)], [()], "k+, k+ -> "),
        ("d*^ n -> n", [(4, 3, 2)], [(2,)], "d0^ d1^ n -> n"),
        ("b _ c, _* -> b _ c _", [(2, 5, 3), (4, 1)], [(2, 1, 3, 6)], "b 5 c, 4 1 -> b 1 c 6"),
    ],
)
def test_fits(text: str, reads: list[tuple[int, ...]], makes: list[tuple[int, ...]], shown: str) -> None:
    assert str(_fit(text, reads, makes, algorithms={"x": Exchange()})) == shown


def test_sizes_and_marks() -> None:
    rule = _fit("b (h d), h k+ s^, &h -> b h d", [(2, 12), (3, 5, 7), (3,)], [(2, 3, 4)])
    assert rule.sizes == {"b": 2, "h": 3, "d": 4, "k": 5, "s": 7}
    assert (rule.summed, rule.frozen, rule.added) == ({"k"}, {"s"}, {2})
    assert rule.cuttable == ("b", "h", "d", "k")


def test_names_of_size_one_may_be_left_out() -> None:
    text, shapes = "b (g c) s* -> b (c g) s*", [(1, 6, 4, 1)]
    assert str(_fit(text, shapes, shapes, sizes={"g": 1})) == "b (g c) s0 1 -> b (c g) s0 1"
    rule = _fit(text, shapes, shapes, sizes={"g": 1}, ones=False)
    assert str(rule) == "1 c s0 1 -> 1 c s0 1" and rule.sizes == {"c": 6, "s0": 4}


def test_left_out_operands() -> None:
    sets = ((0, 2), (1, 2))
    rule = _fit("b k+, n k+, &n -> b n", [(2, 4), (3, 4)], [(2, 3)], present=(0, 1, None), linear=sets)
    assert rule.linear == (frozenset({0}), frozenset({1})) and not rule.added
    turned = _fit("b k+, n k+, &n -> b n", [(3,), (2, 4), (3, 4)], [(2, 3)], present=(1, 2, 0), linear=sets)
    assert str(turned) == "&n, b k+, n k+ -> b n" and turned.linear == (frozenset({0, 1}), frozenset({0, 2}))


def test_whole_numbers_are_never_addends() -> None:
    tensors = [Tensor("x", (4,), torch.int64)]
    assert not instantiate(parse("n -> n"), tensors, tensors, linear=((0,),)).linear


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("a b", 3, "'->'"),
        ("a (b c -> a b c", 2, "not closed"),
        ("a a -> a", 2, "twice"),
        ("a k -> a", 2, "not in every output"),
        ("a, b -> a", 3, "not in every output"),
        ("a k+ -> a k", 2, "in every output"),
        ("k+ -> k+, a k", 0, "in every output"),
        ("a* b* -> a* b*", 0, "one 'name*'"),
        ("a ? -> a", 2, "expected a dim"),
        ("a -> & a", 5, "only operands"),
        ("k+ n, k^ n -> n", 7, "both"),
        ("a -> a -> a", 7, "unexpected"),
        ("(a _) -> a", 3, "of its own"),
        ("a _+ -> a", 3, "expected a dim"),
    ],
)
def test_faults_in_text(text: str, column: int, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    lines = caught.value.message.splitlines()
    assert words in lines[0]
    assert lines[1] == f"  {text}"
    assert lines[2].index("^") - 2 == column


@pytest.mark.parametrize(
    ("text", "reads", "makes", "column", "words"),
    [
        ("m k+, k+ n -> m n", [(3, 4), (5, 6)], [(3, 6)], 6, "4 elsewhere and 5"),
        ("m k+, k+ n -> m n", [(3, 4, 2), (4, 6)], [(3, 6)], 0, "does not fit"),
        ("b* n, b* n -> b* n", [(2, 4), (3, 4)], [(3, 4)], 6, "elsewhere"),
        ("b (h d), h -> b h d", [(2, 10), (3,)], [(2, 3, 4)], 2, "do not make"),
        ("(a b)+ -> ", [(6,)], [()], 5, ""),
        ("b (h^ d^) -> b", [(2, 12)], [(2,)], 2, "do not tell"),
        ("b 3 -> b 3", [(2, 4)], [(2, 3)], 2, "3 elsewhere and 4"),
    ],
)
def test_faults_in_shapes(
    text: str, reads: list[tuple[int, ...]], makes: list[tuple[int, ...]], column: int, words: str
) -> None:
    with pytest.raises(RuleError) as caught:
        _fit(text, reads, makes)
    lines = caught.value.message.splitlines()
    assert words in lines[0]
    assert lines[2].index("^") - 2 == column


def test_wrong_number_of_operands() -> None:
    with pytest.raises(RuleError, match="2 operands, the operator 1"):
        _fit("a, a -> a", [(2,)], [(2,)])
