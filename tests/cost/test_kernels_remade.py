"""Calls made again from keys: they have the same key, and can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cost.recorded import record
from tests.pools import Pools
from weft.cost.compute.kernel import kernel_of
from weft.cost.compute.measuring import measure, time_call, time_keys
from weft.cost.compute.overhead import Overhead, measure_overhead
from weft.cost.compute.remake import CannotRemake, remake


def leaf(*sizes: int) -> Tensor:
    return torch.rand(sizes, requires_grad=True)


def rows(count: int, *sizes: int) -> Tensor:
    return torch.randint(count, sizes)


def trained(make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    weights = [leaf(4, 3), leaf(3)]
    optimizer = make(weights, **options)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()


def norm_of(module: nn.Module, *sizes: int) -> Tensor:
    return module(leaf(*sizes))


def scattered() -> Tensor:
    x = leaf(5, 4)
    y = x.scatter(0, rows(5, 2, 4), leaf(2, 4)).scatter_add(1, rows(4, 5, 2), leaf(5, 2))
    return y.index_add(0, rows(5, 3), leaf(3, 4)).index_copy(1, torch.arange(2), leaf(5, 2))


def taken() -> Tensor:
    x = leaf(5, 4)
    return x.gather(1, rows(4, 5, 3)).sum() + x[rows(5, 6), rows(4, 6)].sum() + x.index_select(0, rows(5, 7)).sum()


def attention(causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(leaf(2, 2, 6, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 8), is_causal=causal)


def clipped() -> None:
    weight = leaf(4)
    weight.grad = torch.ones(4)
    nn.utils.clip_grad_norm_([weight], 1.0)


CASES: dict[str, Callable[[], Any]] = {
    "mm": lambda: leaf(4, 3) @ leaf(3, 5),
    "bmm": lambda: leaf(2, 4, 3) @ leaf(2, 3, 5),
    "linear": lambda: F.linear(leaf(2, 4, 3), leaf(5, 3), leaf(5)),
    "einsum": lambda: torch.einsum("abc,cd->abd", leaf(2, 3, 4), leaf(4, 5)),
    "baddbmm": lambda: torch.baddbmm(leaf(2, 4, 5), leaf(2, 4, 3), leaf(2, 3, 5)),
    "conv1d": lambda: F.conv1d(leaf(2, 3, 9), leaf(4, 3, 3), leaf(4), padding=1),
    "conv2d": lambda: F.conv2d(leaf(2, 4, 9, 9), leaf(6, 2, 3, 3), leaf(6), stride=2, groups=2),
    "conv_transpose2d": lambda: F.conv_transpose2d(leaf(2, 4, 5, 5), leaf(4, 3, 3, 3), stride=2),
    "attention": partial(attention, False),
    "causal attention": partial(attention, True),
    "attention in words": lambda: F.softmax(leaf(2, 4, 6) @ leaf(2, 6, 4) / 2.4, -1) @ leaf(2, 4, 3),
    "embedding": lambda: F.embedding(rows(10, 2, 6), leaf(10, 4)),
    "layer norm": lambda: F.layer_norm(leaf(2, 4, 6), (6,), leaf(6), leaf(6)),
    "rms norm": lambda: F.rms_norm(leaf(2, 4, 6), (6,), leaf(6)),
    "group norm": partial(norm_of, nn.GroupNorm(2, 4), 2, 4, 5, 5),
    "batch norm": partial(norm_of, nn.BatchNorm2d(4), 2, 4, 5, 5),
    "batch norm in evaluation": partial(norm_of, nn.BatchNorm2d(4).eval(), 2, 4, 5, 5),
    "cross entropy": lambda: F.cross_entropy(leaf(6, 5), rows(5, 6)),
    "cross entropy of planes": lambda: F.cross_entropy(leaf(2, 5, 3, 3), rows(5, 2, 3, 3)),
    "mse": lambda: F.mse_loss(leaf(6, 5), leaf(6, 5)),
    "binary cross entropy": lambda: F.binary_cross_entropy(leaf(6), torch.rand(6)),
    "softmax": lambda: F.softmax(leaf(4, 5), 0),
    "logsumexp": lambda: leaf(4, 5).logsumexp(1),
    "gelu": lambda: F.gelu(leaf(4, 5)),
    "silu": lambda: F.silu(leaf(4, 5)) * F.relu(leaf(4, 5)),
    "tanh": lambda: leaf(4).tanh() + leaf(4).sigmoid() + leaf(4).exp() + leaf(4).rsqrt() + leaf(4).log(),
    "pow": lambda: leaf(4) ** 2 + leaf(4) ** 2.5 + leaf(4).abs() / leaf(4),
    "dropout": lambda: F.dropout(leaf(4, 5), 0.3),
    "reductions": lambda: leaf(4, 5).mean(1).sum() + leaf(4, 5).amax(0).sum() + leaf(4, 5).var(1).sum(),
    "norm": lambda: leaf(4, 5).norm() + leaf(4, 5).norm(float("inf")),
    "cat": lambda: torch.cat([leaf(2, 3), leaf(4, 3)]) + torch.stack([leaf(3)] * 6),
    "where": lambda: torch.where(torch.rand(4) < 0.5, leaf(4), leaf(4)).masked_fill(torch.rand(4) < 0.5, -1.0),
    "cumsum": lambda: leaf(4, 5).cumsum(1).sort(1).values,
    "topk": lambda: leaf(4, 5).topk(2).values,
    "gather and index": taken,
    "scatter": scattered,
    "pooling": lambda: F.max_pool2d(leaf(2, 3, 8, 8), 2) + F.avg_pool2d(leaf(2, 3, 8, 8), 2),
    "adaptive pooling": lambda: F.adaptive_avg_pool2d(leaf(2, 3, 8, 8), 1),
    "interpolate": lambda: F.interpolate(leaf(2, 3, 4, 4), scale_factor=2),
    "pad, flip, roll": lambda: F.pad(leaf(4, 5), (1, 1)).flip(0).roll(1, 1).tril().repeat(2, 1),
    "slices": lambda: leaf(4, 5)[1:3, 2] * leaf(4, 5)[0, 1],
    "bfloat16": lambda: F.linear(leaf(4, 3).bfloat16(), leaf(5, 3).bfloat16()).float(),
    "complex": lambda: torch.view_as_complex(leaf(4, 2)) * torch.view_as_complex(leaf(4, 2)),
    "strides": lambda: leaf(4, 5).t().contiguous() + leaf(5).expand(5, 5)[:, :4] + leaf(5, 8)[:, ::2],
    "whole numbers": lambda: (rows(5, 4) + 1).float().mean() + torch.arange(4).cumsum(0).float().sum() + leaf(4),
    "one_hot": lambda: torch.zeros(3, 5).scatter_(1, rows(5, 3, 1), 1.0) + leaf(3, 5),
    "lstm": lambda: nn.LSTM(3, 4)(leaf(5, 2, 3))[0],
    "in place": lambda: torch.zeros(4).add_(1.0).mul_(2.0).copy_(torch.ones(4)).clamp_(min=0.5).zero_().fill_(1.0),
    "clipping": clipped,
    "sgd": partial(trained, torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": partial(trained, torch.optim.Adam, lr=0.1, foreach=True),
    "fused adamw": partial(trained, torch.optim.AdamW, lr=0.1, fused=True),
    "fused sgd": partial(trained, torch.optim.SGD, lr=0.1, fused=True),
    "loop of adamw": partial(trained, torch.optim.AdamW, lr=0.1, foreach=False),
}


def with_backward(run: Callable[[], Any]) -> None:
    made = run()
    if isinstance(made, Tensor) and made.requires_grad:
        made.backward(torch.ones_like(made))


@pytest.mark.parametrize("name", CASES)
def test_a_call_made_again_has_the_same_key(name: str) -> None:
    kernels = {kernel.key: kernel for kernel in record(lambda: with_backward(CASES[name]))}
    assert kernels
    for key, kernel in kernels.items():
        call = remake(key)
        for _ in range(2):
            args, kwargs = call.make()
            with torch.no_grad():
                result = call.func(*args, **kwargs)
        again = kernel_of(call.func, args, kwargs, result)
        # what else an operator returns may depend on whether there is a backward
        assert again is not None and (again.key, again.flops, again.dtype) == (key, kernel.flops, kernel.dtype)


def test_every_copy_is_its_own_and_can_be_timed() -> None:
    kernels = record(lambda: with_backward(CASES["fused adamw"])) + record(lambda: with_backward(CASES["strides"]))
    for kernel in kernels:
        assert time_call(kernel.key) > 0
    (key,) = {kernel.key for kernel in kernels if kernel.op == "_fused_adamw_"}
    call = remake(key)
    (first, _), (second, _) = call.make(), call.make()
    assert not {one.data_ptr() for one in first[0]} & {one.data_ptr() for one in second[0]}


def test_what_cannot_be_made_again_is_said() -> None:
    masked = '["index.Tensor", {"t": ["float32", [4], [1]]}, [{"t": ["bool", [4], [1]]}], {}]'
    with pytest.raises(CannotRemake, match="mask"):
        remake(masked).make()
    with pytest.raises(CannotRemake, match="depends on values"):
        remake('["nonzero.default", {"t": ["float32", [4], [1]]}, {}]')
    with pytest.raises(CannotRemake, match="does not know"):
        remake('["no_such_operator.default", {}]')
    with pytest.raises(CannotRemake, match="which are allowed is not known"):
        remake('["searchsorted.Tensor", {"t": ["int64", [4], [1]]}, {"t": ["int64", [4], [1]]}, {}]').make()


def test_ranks_measure_together(pools: Pools) -> None:
    keys = [kernel.key for kernel in record(CASES["mm"])]
    keys.append('["nonzero.default", {"t": ["float32", [4], [1]]}, {}]')
    keys.append('["mm.default", {"t": ["float32", [4, 3], [3, 1]]}, {"t": ["float32", [4, 3], [3, 1]]}, {}]')
    for product, nothing, wrong in pools(2).run(time_keys, (keys[-3:], "cpu")):
        assert product > 0
        assert "depends on values" in nothing
        assert "refuses the call: RuntimeError" in wrong


def test_measuring_starts_processes_and_says_what_it_could_not() -> None:
    kernels = record(CASES["mm"]) * 2 + record(lambda: torch.ones(4).nonzero())
    told: list[tuple[int, int]] = []
    kept: dict[str, float] = {}
    found = measure(kernels, done=lambda count, total: told.append((count, total)), keep=kept.update)
    assert set(found.seconds) | set(found.refused) == {kernel.key for kernel in kernels}
    assert len(found.refused) == 1 and kept == found.seconds
    assert told[-1] == (len(found.seconds) + 1,) * 2


def test_overhead_is_measured() -> None:
    found = measure_overhead()
    assert isinstance(found, Overhead) and min(astuple(found)) >= 0
