"""Counted initialisation: the same elements under every cut, of the distributions that the constructor names."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import weft
from tests.models import GPT, GPTConfig, gpt_example
from tests.train.test_initialise import Odd, gpt2, llama
from weft.errors import RunError
from weft.runtime.layout.execute import size, take
from weft.runtime.start.counted import Counted, NotElementwise
from weft.runtime.start.elements import CHUNK
from weft.runtime.start.initialise import begin, build, module_tensors
from weft.runtime.start.record import At


def counted(make, seed: int = 3) -> tuple[Counted, dict[str, At]]:
    record = begin(make, seed).record
    assert record is not None
    return Counted(record), {name: one for name, one in record.tensors.items() if isinstance(one, At)}


def whole(found: Counted, name: str, at: At) -> torch.Tensor:
    return part(found, name, at, tuple(((0, length),) for length in at.size))


def part(found: Counted, name: str, at: At, index) -> torch.Tensor:
    into = torch.empty(size(index), dtype=at.dtype)
    found.check([name])
    found.fill(name, index, into)
    return into


@pytest.mark.parametrize("make", [gpt2, llama, Odd], ids=lambda make: make.__name__)
def test_a_part_is_the_part_of_the_whole(make) -> None:
    found, tensors = counted(make)
    checked = 0
    for name, at in tensors.items():
        try:
            all_of_it = whole(found, name, at)
        except NotElementwise:
            continue
        index = tuple(((n // 2, n), (0, n // 3)) if n > 2 else ((0, n),) for n in at.size)
        assert torch.equal(part(found, name, at, index), take(all_of_it, index)), name
        checked += 1
    assert checked > 10


def one(fill, shape=(300, 400)):
    def make() -> nn.Module:
        module = nn.Module()
        module.register_parameter("w", nn.Parameter(torch.empty(shape)))
        fill(module.w)
        return module

    return make


KINDS = {
    "normal": lambda w: nn.init.normal_(w, 1.0, 0.5),
    "uniform": lambda w: nn.init.uniform_(w, -3.0, 1.0),
    "truncated": lambda w: nn.init.trunc_normal_(w, 0.5, 2.0, -1.0, 3.0),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "xavier": nn.init.xavier_normal_,
    "exponential": lambda w: w.data.exponential_(2.0),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "composed": lambda w: w.data.copy_(torch.rand(300, 400).mul(3).add(1).log().neg_()),
}
BOUNDS = {"uniform": (-3.0, 1.0), "truncated": (-1.0, 3.0), "exponential": (0.0, math.inf), "bernoulli": (0.0, 1.0)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_that_of_the_constructor(kind: str) -> None:
    make = one(KINDS[kind])
    found, tensors = counted(make)
    mine, theirs = whole(found, "w", tensors["w"]).flatten(), build(make, 3).w.detach().flatten()
    levels = torch.linspace(0, 1, 11)[1:-1]
    spread = theirs.quantile(0.95) - theirs.quantile(0.05)
    assert (mine.quantile(levels) - theirs.quantile(levels)).abs().max() < 0.03 * spread
    if kind in BOUNDS:
        assert BOUNDS[kind][0] <= mine.min() and mine.max() <= BOUNDS[kind][1]
    # neighbours, across chunks too, know nothing of each other
    assert torch.corrcoef(torch.stack([mine[:-1], mine[1:]]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([mine[:CHUNK], mine[CHUNK : 2 * CHUNK]]))[0, 1].abs() < 0.03
    assert (mine - theirs).abs().max() > 0, "another stream than torch's"


def test_constants_slices_and_copies_are_those_of_the_constructor() -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.padded = nn.Embedding(500, 300, padding_idx=3)
            self.ones = nn.LayerNorm(100_000)
            self.rows = nn.Parameter(torch.empty(70_000, 2))
            with torch.no_grad():
                for row, value in enumerate((5.0, 7.0)):
                    self.rows[row::2].fill_(value)
            self.again = nn.Parameter(self.padded.weight.detach().clone().T.contiguous())
            self.places = nn.Parameter(torch.arange(100_000).cos().cumsum(0))
            self.scaled = nn.Parameter(torch.randn(400, 300) * torch.arange(120_000).view(400, 300).sin())

    found, tensors = counted(Pieces)
    expected = module_tensors(build(Pieces, 3))
    mine = {name: whole(found, name, at) for name, at in tensors.items()}
    for name in ("ones.weight", "ones.bias", "rows", "places"):
        assert torch.equal(mine[name], expected[name]), name
    assert mine["padded.weight"][3].abs().max() == 0 < mine["padded.weight"][4].abs().min()
    assert torch.equal(mine["again"], mine["padded.weight"].T)
    assert (mine["scaled"][0, 0], expected["scaled"][0, 0]) == (0, 0)


def test_names_and_seeds_have_streams_of_their_own() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        first = nn.Linear(300, 300)
        torch.manual_seed(1)
        return nn.Sequential(first, nn.Linear(300, 300))

    found, tensors = counted(make, 3)
    other, _ = counted(make, 4)
    again, _ = counted(lambda: nn.ModuleDict({"0": nn.Linear(300, 300)}), 3)
    mine = [
        whole(each, name, tensors[name])
        for each, name in ((found, "0.weight"), (found, "1.weight"), (other, "0.weight"))
    ]
    assert all(not torch.equal(a, b) for a, b in pairwise(mine))
    assert torch.equal(mine[0], whole(again, "0.weight", tensors["0.weight"])), "of seed, name and element alone"


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_parallelize_is_the_same_under_every_plan(plan: str) -> None:
    config = GPTConfig()

    def start(plan: str, **options) -> dict[str, torch.Tensor]:
        module = weft.parallelize(lambda: GPT(config), gpt_example(config), plan, emulate=True, cache=None, **options)
        return module.state_dict()

    mine, alone = start(plan, init="counter", seed=5), start("dp=1", init="counter", seed=5)
    assert mine.keys() == alone.keys()
    assert [name for name in mine if not torch.equal(mine[name], alone[name])] == []
    exact = build(lambda: GPT(config), 5).state_dict()
    assert any(not torch.equal(mine[name], exact[name]) for name in mine)


class Loss(nn.Module):
    def __init__(self, orthogonal: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(300, 300)
        if orthogonal:
            nn.init.orthogonal_(self.inner.weight)

    def forward(self, x):
        return self.inner(x).square().mean()


def test_what_is_not_elementwise_is_refused_with_its_line() -> None:
    with pytest.raises(RunError, match=r"inner\.weight cannot be counted") as caught:
        weft.parallelize(Loss, (torch.zeros(4, 300),), "dp=2", emulate=True, cache=None, init="counter")
    assert "test_counted.py:" in caught.value.place and "exact" in caught.value.remedy


def test_what_has_its_values_is_not_counted() -> None:
    with pytest.raises(RunError, match="nothing is left to be counted"):
        weft.parallelize(Loss(), (torch.zeros(4, 300),), "dp=2", emulate=True, cache=None, init="counter")
    with pytest.raises(RunError, match="init is 'random'"):
        weft.parallelize(Loss, (torch.zeros(4, 300),), "dp=2", emulate=True, cache=None, init="random")


def test_values_that_are_never_set_are_refused() -> None:
    class Forgotten(Loss):
        def __init__(self) -> None:
            super().__init__()
            self.inner.bias = nn.Parameter(torch.empty(300))

    for init in ("exact", "counter"):
        with pytest.raises(RunError, match=r"inner\.bias: the construction never sets"):
            weft.parallelize(Forgotten, (torch.zeros(4, 300),), "dp=2", emulate=True, cache=None, init=init)
