"""Weights and gradients that travel by block of the model, as on devices: the numbers of one device, in few calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import weft
from tests.devices.in_process import Recorder
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
def test_numbers_are_those_of_one_device(recorders: list[Recorder], file: str, plan: str) -> None:
    result = weft.verify(EXAMPLES / file, plan=plan)
    assert result.equal, str(result)
    kinds = {event.kind for one in recorders for events in one.histories for event in events}
    assert kinds >= {"all_gather", "reduce_scatter"}
