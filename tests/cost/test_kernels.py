"""Kernels: keys that are equal and different as they should be, and what is counted."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.cost.recorded import record
from weft.cost.compute.kernel import Kernel, kernel_of, read, structure
from weft.runtime.checks.max_shape_mode import MaxShapeMode

aten = torch.ops.aten


def one(func, *args, **kwargs) -> Kernel:
    found = kernel_of(func, args, kwargs, func(*args, **kwargs))
    assert found is not None
    return found


def test_equal_calls_have_equal_keys_and_others_do_not() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    same = one(aten.mm.default, a, b)
    assert one(aten.mm.default, torch.zeros(4, 8), torch.ones(8, 6)) == same
    assert one(aten.mm.default, a, torch.randn(6, 8).t()).key != same.key
    assert one(aten.mm.default, a.double(), b.double()).key != same.key
    assert one(aten.mm.default, torch.randn(5, 8), b).key != same.key
    assert one(aten.sum.dim_IntList, a, [0]).key != one(aten.sum.dim_IntList, a, [1]).key
    assert one(aten.mul.Tensor, a, 2.0).key == one(aten.mul.Tensor, a, 3.0).key != one(aten.mul.Tensor, a, 0.0).key
    # of these the time does depend on the number
    assert one(aten.pow.Tensor_Scalar, a, 2.0).key != one(aten.pow.Tensor_Scalar, a, 2.5).key
    infinite = one(aten.linalg_vector_norm.default, a, float("inf")).key
    assert infinite != one(aten.linalg_vector_norm.default, a, 1.0).key and json.loads(infinite)


def test_fake_tensors_have_the_keys_of_real_ones() -> None:
    real = record(lambda: F.cross_entropy(torch.randn(4, 8), torch.randint(8, (4,))))
    with FakeTensorMode():
        fake = record(lambda: F.cross_entropy(torch.randn(4, 8), torch.randint(8, (4,))))
    assert [kernel.key for kernel in real] == [kernel.key for kernel in fake]


def test_views_are_no_kernels() -> None:
    x = torch.randn(4, 8)
    assert not record(lambda: x.view(8, 4).t().detach()[1:].expand(2, 3, 8))


def test_what_is_counted() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    found = one(aten.mm.default, a, b)
    assert (found.op, found.dtype, found.flops) == ("mm", "float32", 2 * 4 * 8 * 6)
    assert found.bytes == 4 * (32 + 48 + 24) and found.elements == 48
    # read and written
    assert one(aten.add_.Tensor, a, torch.randn(4, 8)).bytes == 4 * 3 * 32
    # written alone
    assert one(aten.copy_.default, a, torch.randn(4, 8)).bytes == 4 * 2 * 32
    # what is expanded is there once
    assert one(aten.add.Tensor, a, torch.randn(1, 8).expand(4, 8)).bytes == 4 * (32 + 8 + 32)
    # of a table, the rows that are asked for
    rows = one(aten.embedding.default, torch.randn(1000, 8), torch.zeros(3, dtype=torch.int64))
    assert rows.bytes <= 2 * (3 * 8 * 4 + 3 * 8)
    parts = [[torch.ones(10)] for _ in range(4)]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    step = one(aten._fused_adamw_.default, *parts, [], [torch.ones(())], **numbers, amsgrad=False, maximize=False)
    # all of the four are read, and all are written to: torch says so of gradients too
    assert step.bytes == 4 * (2 * 4 * 10 + 1)


def test_attention_on_processors_is_counted() -> None:
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    forward, *_, backward = (
        kernel for kernel in record(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()) if kernel.flops
    )
    assert forward.flops == 2 * 2 * (2 * 3 * 16 * 16 * 8)
    assert backward.flops == forward.flops * 5 // 2


def test_structure_leaves_sizes_out() -> None:
    def product(m: int, n: int, k: int, turned: bool = False) -> str:
        right = torch.randn(n, k).t() if turned else torch.randn(k, n)
        return structure(one(aten.mm.default, torch.randn(m, k), right).key)

    assert product(32, 48, 64) == product(100, 200, 300)
    assert product(32, 48, 64) != product(32, 48, 64, turned=True)
    x = torch.randn(64, 128)
    norms = {
        structure(one(aten.native_layer_norm.default, t, [t.shape[1]], None, None, 1e-5).key) for t in (x, x[:, ::2])
    }
    assert len({structure(one(aten.sum.dim_IntList, x, [dim]).key) for dim in (0, 1)}) == 2
    assert len(norms) == 1 or x[:, ::2].stride() != x.stride()
    several = [structure(one(aten.cat.default, [x] * count).key) for count in (2, 5)]
    assert several[0] == several[1]


def test_reading_a_key() -> None:
    found = read(one(aten.sum.dim_IntList, torch.randn(3, 4), [1], True).key)
    assert found.func is aten.sum.dim_IntList and found.named["keepdim"] is True and found.named["dim"] == [1]
    with pytest.raises(AttributeError):
        read('["no_such_operator.default", {}]')


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_without_values(dtype: torch.dtype) -> None:
    """Fake tensors have them in bfloat16 only."""
    x, weights = torch.rand(32, 16, dtype=dtype), torch.rand(2, 16, 8, dtype=dtype)
    y, ends = torch.rand(32, 8, dtype=dtype), torch.tensor([10, 32], dtype=torch.int32)
    for left, right in ((x, weights), (x.transpose(0, 1), y)):
        true = torch.ops.aten._grouped_mm(left, right, ends)
        with FakeTensorMode() as fake, MaxShapeMode():
            operands = [fake.from_tensor(each) for each in (left, right, ends)]
            found = torch.ops.aten._grouped_mm(*operands)
        assert (found.shape, found.dtype) == (true.shape, true.dtype)
        kernel = kernel_of(torch.ops.aten._grouped_mm.default, operands, {}, found)
        assert kernel is not None and kernel.flops == 2 * 32 * 16 * 8
