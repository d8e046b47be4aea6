"""Weights and gradients that travel by block of the model, as on devices: the numbers of one device, in few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.runtime.links.transport import Group, Handle, Sharded, Transport
from weft.runtime.weights import buckets
from weft.runtime.weights.buckets import Blocks

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Weight:
    name: str
    key: str = "group"
    num_bytes: int = 8


def names(found: list[list[Weight]]) -> list[list[str]]:
    return [[one.name for one in each] for each in found]


def test_what_has_no_number_goes_with_its_neighbours() -> None:
    order = [Weight(name) for name in ("embed", "h.0.a", "h.0.b", "h.1.a", "middle", "h.2.a", "norm", "head")]
    blocks = Blocks.among({one.name: 8 for one in order})
    assert names(blocks.split(order)) == [["embed", "h.0.a", "h.0.b"], ["h.1.a", "middle"], ["h.2.a", "norm", "head"]]
    back = [["head", "norm", "h.2.a", "middle"], ["h.1.a"], ["h.0.b", "h.0.a", "embed"]]
    assert names(blocks.split(order[::-1])) == back
    assert blocks.split([]) == []


def test_a_model_without_numbers_is_one_block() -> None:
    order = [Weight(name) for name in ("up", "down")]
    assert names(Blocks.among({"up": 8, "down": 8}).split(order)) == [["up", "down"]]


def test_groups_of_a_block_have_calls_of_their_own() -> None:
    order = [Weight("h.0.a"), Weight("h.0.b", "other"), Weight("h.0.c")]
    assert names(Blocks.among({one.name: 8 for one in order}).split(order)) == [["h.0.a", "h.0.c"], ["h.0.b"]]


def test_large_blocks_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BLOCK", 20)
    sizes = {"h.0.norm": 8, "h.0.experts.0.w": 8, "h.0.experts.1.w": 8, "h.1.w": 8}
    assert Blocks.among(sizes).of == {
        "h.0.norm": "h.0",
        "h.0.experts.0.w": "h.0.experts.0",
        "h.0.experts.1.w": "h.0.experts.1",
        "h.1.w": "h.1",
    }


class Late:
    """A call whose results are there when it is waited for and no sooner, and that reads its inputs until then.

    Args:
        handle: gives the result of the call.
        inputs: what it reads.
    """

    def __init__(self, handle: Handle[Any], inputs: Sequence[Tensor]) -> None:
        self._handle, self._inputs = handle, [(one, one.detach().clone()) for one in inputs]
        self._waited = False

    def wait(self) -> Any:
        if not self._waited:
            self._waited = True
            for one, before in self._inputs:
                assert torch.equal(one.detach(), before), "an input was written to before the call was waited for"
        return self._handle.wait()


def unset(tensors: Sequence[Sharded]) -> None:
    """What is to be filled in has no values yet; a shard that lies there keeps its own."""
    for one in tensors:
        shard = one.shard.detach().clone()
        if one.full.is_floating_point():
            one.full.detach().fill_(torch.nan)
        one.shard.detach().copy_(shard)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is started, of all ranks. All transports are as those of devices in this: by block, and late."""
    found: Counter[str] = Counter()
    gather, scatter = Transport.start_all_gather, Transport.start_reduce_scatter
    monkeypatch.setattr(Transport, "by_block", True)

    def start_all_gather(self: Transport, tensors: Sequence[Sharded], group: Group) -> Handle[None]:
        found["all_gather"] += 1
        unset(tensors)
        return Late(gather(self, tensors, group), [one.shard for one in tensors])

    def start_reduce_scatter(self: Transport, tensors: Sequence[Sharded], group: Group) -> Handle[None]:
        found["reduce_scatter"] += 1
        return Late(scatter(self, tensors, group), [one.full for one in tensors])

    monkeypatch.setattr(Transport, "start_all_gather", start_all_gather)
    monkeypatch.setattr(Transport, "start_reduce_scatter", start_reduce_scatter)
    return found


QUICK = [("gpt.py", "dp=2,zero=3"), ("gpt.py", "dp=3,zero=1"), ("models/mixtral.py", "dp=2,zero=3")]
FULL = [
    ("gpt.py", "dp=2,zero=2,recompute=full"),
    ("gpt.py", "dp=2,zero=3,recompute=full"),
    ("gpt.py", "dp=2,pp=2,zero=3,microbatches=4"),
    ("moe.py", "dp=2,zero=3"),
    ("lora.py", "dp=2,zero=3"),
    ("checkpointed.py", "dp=2,zero=3"),
    ("models/llama.py", "dp=2,tp=2,zero=3"),
    ("models/t5.py", "dp=2,zero=3"),
    ("models/unet.py", "dp=2,zero=3"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]


@pytest.mark.parametrize(("file", "plan"), CASES)
def test_numbers_are_those_of_one_device(calls: Counter[str], file: str, plan: str) -> None:
    result = weft.verify(EXAMPLES / file, plan=plan)
    assert result.equal, str(result)
    assert calls["all_gather"] and calls["reduce_scatter"]
