"""`verify` against faults in the text of programs: what trains to other numbers than eager, it calls different.

Truth is found outside of it: four steps over two batches that verify does not see, every gradient and weight compared
with the eager module. An edit that makes the program fail is not silent, and not counted.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.property.text_faults import edited
from weft.compile.model_file import Subject
from weft.compile.programs import Content, Programs
from weft.compile.subject import capture_subject
from weft.ir.graph import Graph
from weft.runtime.links.emulator import run_ranks
from weft.runtime.program.files import files_of
from weft.train.opened import open_rank
from weft.verify import ranks
from weft.verify.judged import judge

TOLERANCE = 1e-9
TIMEOUT = 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randint(12, (4, 6)), torch.randint(12, (4, 6))


class Vision(nn.Module):
    """Buffers that each step changes, a loss of two terms, a subtraction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2).flatten(1)
        z = self.second(h)
        self.seen.mul_(0.9).add_(h.detach().mean() - h.detach().var())
        return F.mse_loss(z, y) - 0.1 * torch.tanh(z - y).mean()

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 2, 4, 4).double(), torch.randn(4, 3).double()


PROGRAMS: list[tuple[type[Any], str]] = [
    (Language, "dp=2"),
    (Language, "tp=2"),
    (Language, "dp=2,tp=2"),
    (Language, "dp=2,zero=3"),
    (Language, "pp=2,microbatches=2"),
    (Vision, "dp=2"),
    (Vision, "tp=2"),
]


@dataclass(frozen=True)
class Case:
    model: nn.Module
    subject: Subject
    graph: Graph
    content: Content
    batches: tuple[Any, ...]
    expected: tuple[list[Tensor], dict[str, Tensor]]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@cache
def case(kind: type[Any], plan: str) -> Case:
    torch.manual_seed(0)
    model = kind().double()
    subject = Subject(model, kind.batch(), optimizer=adamw)
    content = Programs(lambda module: subject, plan, None, cache=None).training(model)
    unseen = (kind.batch(), kind.batch())
    batches = (*unseen, *unseen)
    eager = copy.deepcopy(model)
    optimizer, losses = adamw(eager.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = eager(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Case(model, subject, capture_subject(subject), content, batches, (losses, eager.state_dict()))


def trains_to_other_numbers(one: Case, content: Content) -> bool:
    """Whether four steps end elsewhere than eager's; raises what the program raises."""

    def body(transport: Any) -> list[float]:
        module: Any = open_rank(content, transport, one.model, reduction=None)
        optimizer = adamw(module.parameters())
        found = [float(module.train_step(batch, optimizer)) for batch in one.batches]
        apart = [abs(a - float(b)) for a, b in zip(found, one.expected[0], strict=True)]
        whole = one.expected[1]
        for name, index in module.stored.items():
            part = module.state_dict().get(name)
            if part is not None and name in whole:
                mine = whole[name]
                for dim, intervals in enumerate(index):
                    at = [i for start, stop in intervals for i in range(start, stop)]
                    mine = mine.index_select(dim, torch.tensor(at, dtype=torch.long))
                apart.append(float((part - mine).abs().max()) if part.numel() else 0.0)
        return apart

    found = run_ranks(files_of(content).devices, body, timeout=TIMEOUT)
    return not max(value for apart in found for value in apart) < TOLERANCE


def run_edits(
    kind: type[Any], plan: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], list[str]]:
    monkeypatch.setattr(ranks, "run_ranks", partial(run_ranks, timeout=TIMEOUT))
    one, counts, missed, seed = case(kind, plan), Counter[str](), list[str](), seeds.start
    assert not trains_to_other_numbers(one, one.content)
    texts = sorted(name for name in one.content if name.endswith(".py"))
    while counts.total() < len(seeds):
        seed += 1
        rng = random.Random(seed)
        file = rng.choice(texts)
        made = edited(one.content[file].decode(), rng)
        if made is None:
            continue
        content = {**one.content, file: made[1].encode()}
        outcome = judged(partial(trains_to_other_numbers, one, content))
        counts[f"{made[0]}: {outcome}"] += 1
        if outcome == "other numbers" and judged(partial(is_refuted, one, content)) == "the same":
            missed.append(f"{made[0]} of {kind.__name__}, {plan}, {file}, seed {seed}")
    return counts, missed


def is_refuted(one: Case, content: Content) -> bool:
    return not judge(files_of(content), one.graph, one.subject, seed=0, tolerance=TOLERANCE).equal


def judged(differs: Callable[[], bool]) -> str:
    try:
        return "other numbers" if differs() else "the same"
    except Exception:  # noqa: BLE001  a program that fails in any way is not silent
        return "fails"


def expect_none_missed(kind: type[Any], plan: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, missed = run_edits(kind, plan, seeds, monkeypatch)
    print(f"\n{kind.__name__} {plan}: {dict(sorted(counts.items()))}")
    assert not missed
    assert sum(number for name, number in counts.items() if name.endswith("other numbers")) > len(seeds) / 30


# an edit may make torch warn; it is wrong then all the same
pytestmark = pytest.mark.filterwarnings("ignore")


def test_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_none_missed(Language, "dp=2,tp=2", range(20), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "plan"), PROGRAMS)
def test_many_edits(kind: type[Any], plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_none_missed(kind, plan, range(1000, 1000 + 290), monkeypatch)
