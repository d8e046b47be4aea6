"""Masks that are the same in every step: said in words where words say all, left alone everywhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from weft.capture import capture
from weft.verify import verify

LENGTH = 6
Mask = Callable[[Tensor], Tensor]


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return (at[None, :] <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def additive(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)


def infinite(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(~everything(x).tril(), -torch.inf)


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)


def window(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return causal(x) & (at[:, None] - at[None, :] < 3)


def slope(x: Tensor) -> Tensor:
    return additive(x) - 0.5 * torch.ones(LENGTH, LENGTH).tril(-1)


def of_the_batch(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :, 0] < 1e9)


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(query, key, value, attn_mask=self.mask(x)).square().mean()


def attention_of(mask: Mask) -> tuple[int, dict[str, object]]:
    """The number of tensors that the attention reads, and its options."""
    graph = capture(Attention(mask), (torch.randn(2, LENGTH, 8),))
    (found,) = (op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    made = {name for op in graph.ops for name in op.inputs}
    assert all(made.intersection(op.outputs) or op.outputs[0] in graph.outputs for op in graph.ops), "a dead op"
    return len(found.inputs), dict(found.kwargs)


@pytest.mark.parametrize("mask", [causal, additive, infinite])
def test_causal_masks_are_words(mask: Mask) -> None:
    reads, options = attention_of(mask)
    assert reads == 3 and options["is_causal"] is True


def test_a_batch_of_one_mask_is_looked_at_once() -> None:
    """All masks together would take 2 GiB."""

    def shared(x: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        groups = (torch.diff(numbers, prepend=numbers[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return causal(x) & (groups[:, None, :, None] == groups[:, None, None, :])

    graph = capture(Attention(shared), (torch.zeros(1).expand(512, 2048, 8),))
    (found,) = (op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    assert len(found.inputs) == 3 and dict(found.kwargs)["is_causal"] is True


def test_a_mask_that_hides_nothing_goes() -> None:
    reads, options = attention_of(everything)
    assert reads == 3 and not options.get("is_causal")


@pytest.mark.parametrize("mask", [window, slope, of_the_batch])
def test_other_masks_stay(mask: Mask) -> None:
    reads, options = attention_of(mask)
    assert reads == 4 and not options.get("is_causal")


@pytest.mark.parametrize("mask", [causal, additive, everything, window])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_same_numbers(mask: Mask, plan: str) -> None:
    assert verify(Attention(mask), (torch.randn(2, LENGTH, 8),), plan=plan).equal
