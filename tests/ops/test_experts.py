"""Grouped products cut along rows, groups and both widths, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cells import Case, prove_cells, whole_case
from weft.errors import RuleError
from weft.ir.graph import Graph, Op, Ref, Tensor
from weft.ops.precision import Float64Mode
from weft.ops.table import rule_for
from weft.runtime.operators.experts import grouped_mm, grouped_product

ENDS = ([2, 7, 7, 9], [0, 0, 9, 9], [1, 3, 6, 8])
"""Groups of several sizes, of none, and rows that belong to no group."""


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def grouped(ends: list[int], *, transposed: bool = False) -> Case:
    weight = floats(4, 6, 4).transpose(-2, -1) if transposed else floats(4, 4, 6)
    with Float64Mode():
        return whole_case("aten._grouped_mm.default", (floats(9, 4), weight), {"offs": torch.tensor(ends).int()})


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_grouped_products(ends: list[int]) -> None:
    it = prove_cells(grouped(ends))
    assert str(it.rule) == "m k+, g+ k+ n, 4 -> m n"


def test_grouped_products_of_transposed_matrices() -> None:
    prove_cells(grouped(ENDS[0], transposed=True))


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_each_group_has_a_matrix(ends: list[int]) -> None:
    x, weight = floats(9, 4), floats(4, 4, 6)
    out = grouped_mm(x, weight, torch.tensor(ends))
    start = 0
    for matrix, stop in zip(weight, ends, strict=True):
        torch.testing.assert_close(out[start:stop], x[start:stop] @ matrix)
        start = stop
    assert not out[start:].any()


@pytest.mark.parametrize("width", [8, 6], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_lower_floats_use_the_kernel_of_torch_where_it_can(ends: list[int], width: int) -> None:
    x, weight, grad = floats(9, 4), floats(4, 4, width), floats(9, width)
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [one.to(dtype).detach().requires_grad_() for one in (x, weight)]
        out = grouped_mm(*leaves, torch.tensor(ends))
        out.backward(grad.to(dtype))
        results.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_one_number_everywhere() -> None:
    """torch's kernel refuses an expanded one."""
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(4, 4, 8, requires_grad=True)
    grouped_mm(x, weight, torch.tensor(ENDS[0])).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:2], weight[0].sum(1).expand(2, 4))


def test_all_forms_of_torch() -> None:
    """As torch's own operator does in float32, where rows lie at multiples of 16 bytes."""
    ends = torch.tensor([4, 4, 8], dtype=torch.int32)
    shapes = [((8, 4), (3, 4, 12)), ((3, 4, 8), (8, 8)), ((4, 8), (8, 12))]
    for a, b in [(torch.randn(left), torch.randn(right)) for left, right in shapes]:
        theirs = torch.ops.aten._grouped_mm(a, b, ends)
        torch.testing.assert_close(grouped_product(a.double(), b.double(), ends).float(), theirs)
    a, b = torch.randn(3, 4, 8), torch.randn(3, 8, 12)
    torch.testing.assert_close(grouped_product(a, b), torch.ops.aten._grouped_mm(a, b))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [(((4, 8), (8, 6), (3,)), r"shapes \(4, 8\)"), (((8, 4), (3, 4, 6), (3,), (6,)), "bias")],
    ids=["columns", "bias"],
)
def test_other_forms_have_no_rule(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    tensors = {f"x{i}": Tensor(f"x{i}", shape, torch.float32) for i, shape in enumerate(shapes)}
    op = Op("it", "aten._grouped_mm.default", tuple(Ref(name) for name in tensors), (), ("y",))
    graph = Graph("one", {**tensors, "y": Tensor("y", (8, 6), torch.float32)}, (), (), (), {}, (op,), ("y",), None)
    with pytest.raises(RuleError, match=words):
        rule_for(op, graph)


def test_the_fallback_of_transformers_has_the_same_rule() -> None:
    pytest.importorskip("transformers.integrations.moe")
    shapes = {"x": (8, 4), "w": (3, 4, 6), "e": (3,), "y": (8, 6)}
    tensors = {name: Tensor(name, shape, torch.float32) for name, shape in shapes.items()}
    op = Op("it", "transformers.grouped_mm_fallback.default", (Ref("x"), Ref("w"), Ref("e")), (), ("y",))
    graph = Graph("one", tensors, (), (), (), {}, (op,), ("y",), None)
    assert str(rule_for(op, graph)) == "m k+, g+ k+ n, 3 -> m n" and op.kind == "grouped_mm_fallback"
