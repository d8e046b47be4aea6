"""Arguments of forward that are no tensors: what does not say its value is refused when the example is taken."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import weft
from weft.capture import capture
from weft.errors import CaptureError, RunError


class Plain:
    scale = 1.0


class Words(dict[str, torch.Tensor]):
    pass


@dataclass
class Valued:
    scale: float = 2.0


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize(
    ("other", "words", "remedy"),
    [
        (Plain(), r"argument other of the example is a .*\.Plain, which does not say its value", "a plain dict"),
        ({"deep": [Plain()]}, r"argument other\['deep'\]\[0\] of the example is", "a plain dict"),
        (SimpleNamespace(a=Plain()), "SimpleNamespace, which does not say its value", "a plain dict"),
        (SimpleNamespace(a=[torch.ones(2)]), "SimpleNamespace, which holds tensors", "register_dataclass"),
        (Words(a=torch.ones(2)), "Words, which holds tensors", "dict(batch)"),
        (UserDict(a=torch.ones(2)), "UserDict, which holds tensors", "dict(batch)"),
        (nn.Linear(2, 2), "argument other of the example is a module", "submodule"),
    ],
)
def test_refuses_arguments_that_do_not_say_their_value(other: Any, words: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Takes(), (torch.ones(2, 4), other))
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "other",
    [
        *(1, "a", None, torch.float32, torch.device("cpu"), slice(0, 2), Valued(), SimpleNamespace(a=1), {"a": [2.0]}),
        *({1, 2}, torch.tanh, Plain, "a".upper, math, range(3), torch.Size([1]), SimpleNamespace(a=Plain)),
        partial(torch.sum, dim=0),
    ],
    ids=lambda other: type(other).__name__,
)
def test_takes_arguments_that_say_their_value(other: Any) -> None:
    assert capture(Takes(), (torch.ones(2, 4), other)).outputs


def batch_kind() -> type:
    @dataclass
    class Batch:
        x: torch.Tensor

    return Batch


class TakesBatch(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch.x).square().mean()


def test_a_dataclass_is_seen_into_on_ranks_that_capture_nothing() -> None:
    batch = batch_kind()(torch.ones(2, 4))
    with pytest.raises(RunError):
        weft.parallelize(TakesBatch(4, 4), (batch,), "dp=2", emulate=True, cache=None, device="cuda")
    assert pytree.tree_leaves(batch)[0] is batch.x
