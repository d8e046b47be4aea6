"""What pieces send each other: once to each rank that reads it, and gradients added up before they go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.capture import capture
from weft.codegen.pipeline import generate_pipeline
from weft.ir.schedule import Pipeline
from weft.lower.pipeline import lower_pieces
from weft.order import make_schedule
from weft.plan.load import load_plan
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.training.load import crossings_of, load_pipeline
from weft.runtime.training.pipeline import Rank
from weft.runtime.training.stage_io import Crossing, Readers
from weft.runtime.weights.gradient import Gradient, make_leaf

MICROS = 2


class Skips(nn.Module):
    """What the first layer makes is read by the second and the fourth, which live on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        third = self.third(torch.tanh(self.second(h)))
        return nn.functional.mse_loss(self.fourth(third * h), y)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Skips]:
    torch.manual_seed(0)
    module = Skips().double()
    batch = (torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64))
    recipe = f"pp=2,virtual=2,microbatches={MICROS},schedule=interleaved,stages=second+third+fourth"
    made = lower_pieces(load_plan(recipe, capture(module, batch)))
    pipeline = Pipeline(tuple(part.piece.segment for part in made.parts), MICROS)
    for name, content in generate_pipeline([made], make_schedule("interleaved", pipeline)).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path, module


@torch.no_grad()
def filled(rank: Rank, module: nn.Module) -> None:
    state = module.state_dict()
    for one in rank.modules:
        for name in one.stored:
            one.part(name).copy_(state[name])


class Counting:
    """A transport that counts the messages for other ranks."""

    def __init__(self, inner: Transport) -> None:
        self.__dict__["inner"], self.__dict__["posts"] = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        if peer != self.inner.rank and "micro-batch" in tag:
            self.posts[tag] += 1
        self.inner.post(peer, tag, tensors)


def test_a_tensor_with_two_readers_on_a_rank_crosses_once_each_way(files: tuple[Path, Skips]) -> None:
    folder, module = files
    draws = torch.Generator().manual_seed(1)
    batches = [[torch.randn(2, 4, dtype=torch.float64, generator=draws) for _ in "xy"] for _ in range(MICROS)]

    def body(transport: Transport) -> tuple[Counter[str], dict[str, Tensor | None]]:
        counting: Any = Counting(transport)
        rank = load_pipeline(folder, Replica(counting, 2))
        filled(rank, module)
        rank.step(batches, [1 / MICROS] * MICROS, 0, 0)
        return counting.posts, {name: held.grad for one in rank.modules for name, held in one.trained()}

    (ahead, first), (back, second) = run_ranks(2, body)
    torch.stack([module(*one) / MICROS for one in batches]).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close({**first, **second}[name], parameter.grad, rtol=1e-13, atol=1e-14)
    # h and what the third layer makes to the second device; their gradients and what the second makes to the first
    assert sum(ahead.values()) == MICROS * 3, ahead
    assert sum(back.values()) == MICROS * 3, back
    assert max((ahead | back).values()) == 1


def told(target: str, takers: Sequence[int]) -> dict[str, Any]:
    """A tensor of four elements on device 0, whole on some others."""
    whole = [[[0, 4]]]
    sends = {"0": {"sends": [[r, 0, *whole] for r in takers], "receives": [], "shapes": [], "add": False}}
    gets = {"sends": [], "receives": [[0, 0, *whole]], "shapes": [[4]], "add": False}
    forward = {**sends, **{str(r): gets for r in takers}}
    backward = {str(r): {"sends": [[0, 0, *whole]], "receives": [], "shapes": [], "add": False} for r in takers}
    return {
        "tensor": "h",
        "source": "a",
        "target": target,
        "place": "",
        "dtype": "float64",
        "trained": True,
        "forward": forward,
        "backward": backward,
    }


def test_what_crosses_once() -> None:
    """Readers on other sets of devices share a message where they meet, but not a gradient."""
    pieces = [told("b", [1]), told("c", [1, 2]), told("d", [1]), told("e", [3])]
    sender: list[Crossing] = crossings_of(pieces, 0)
    assert [sorted(one.spared) for one in sender] == [[], [1], [1], []]
    assert [one.back_for for one in sender] == ["b", "c", "b", "e"]
    taker = crossings_of(pieces, 1)
    assert [dict(one.comes_for) for one in taker] == [{0: "b"}, {0: "b"}, {0: "b"}, {}]
    readers = Readers.of(taker[:3])
    assert readers.messages == {("h", "b", 0): 3} and readers.gradients == {("h", "b"): 2, ("h", "c"): 1}
    assert crossings_of(pieces, 2)[1].comes_for == {0: "c"}


def test_a_gradient_is_added_up_in_place_where_nothing_else_lies() -> None:
    sink = Gradient()
    leaf = make_leaf(torch.zeros(3), sink)
    (leaf * 2).sum().backward()
    assert sink.total is not None
    address = sink.total.data_ptr()
    (leaf * 3).sum().backward()
    assert sink.total.data_ptr() == address and sink.total.tolist() == [5.0] * 3


def test_a_gradient_that_shares_its_memory_is_left_alone() -> None:
    """The two leaves' first gradients are views of one tensor."""
    first, second = Gradient(), Gradient()
    one, two = make_leaf(torch.zeros(3), first), make_leaf(torch.zeros(3), second)
    both = torch.ones(2, 3)
    one.grad, two.grad = both[0], both[1]
    first.collect(one)
    second.collect(two)
    one.grad = torch.ones(3)
    first.collect(one)
    assert both.tolist() == [[1.0] * 3] * 2 and first.total is not None and first.total.tolist() == [2.0] * 3
    plain = Gradient()
    plain.add(both[0])
    plain.add(both[1])
    assert both.tolist() == [[1.0] * 3] * 2


class Starting(Counting):
    """A transport that can start sums, and remembers in which event each was."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.__dict__["event"], self.__dict__["sums"] = "", []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "doing" and (" of " in value.what) and not value.what.startswith("gradient sync"):
            self.__dict__["event"] = value.what

    def start_all_reduce(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> Any:
        self.sums.append(self.event)
        total = self.inner.all_reduce(torch.cat([part.detach().reshape(-1) for part in parts]), group)
        return SimpleNamespace(wait=lambda: total)

    @property
    def job(self) -> Any:
        return self


def test_sums_over_replicas_start_in_the_last_backward(files: tuple[Path, Skips]) -> None:
    """Each piece's sums start with its last backward, also in the first step; where other replicas complete sizes that
    do not come up here, at the end."""
    folder, module = files
    draws = torch.Generator().manual_seed(1)
    batches = [[torch.randn(2, 4, dtype=torch.float64, generator=draws) for _ in "xy"] for _ in range(MICROS)]

    def body(transport: Transport) -> tuple[list[list[str]], list[dict[str, Tensor]]]:
        starting: Any = Starting(transport)
        rank = load_pipeline(folder, Replica(starting, 2))
        filled(rank, module)
        sums, gradients = [], []
        for step in range(3):
            rank.step(batches, [1 / MICROS] * MICROS, 0, step, completes=() if step < 2 else (0,))
            sums.append(list(starting.sums))
            gradients.append({name: held.grad.clone() for one in rank.modules for name, held in one.trained()})
            starting.sums.clear()
            for one in rank.modules:
                for _, held in one.trained():
                    held.grad = None
        return sums, gradients

    found = run_ranks(4, body)
    for sums, gradients in found:
        assert all(event.startswith("gradients of ") for event in sums[2]) and len(sums[2]) == len(sums[0])
        assert {event[:2] for event in sums[0] + sums[1]} == {f"B{MICROS - 1}"} and len(sums[1]) == len(sums[0])
        for other in gradients[1:]:
            assert all(torch.equal(other[name], gradient) for name, gradient in gradients[0].items())
