"""Co-shard with zero=3: a chunk gathers its own parts of the weights, once in each direction, and lets them go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.models import CausalSelfAttention, GPTConfig
from tests.parts import parts
from tests.pools import Pools
from weft.codegen import generate
from weft.compile import compile_program
from weft.compile.model_file import Subject
from weft.ir.program import Chunks
from weft.runtime.layout.execute import take, together
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import PROGRAM
from weft.runtime.weights.prefetch import Prefetch
from weft.runtime.weights.unshard import Gather
from weft.train.memory.expected import expect_rank
from weft.train.opened import open_rank

RANKS, WIDTH, DEPTH = 2, 32, 3
PLAIN = f"dp={RANKS},zero=3,recompute=blocks.*"
PLANS = (f"{PLAIN},coshard=2", f"dp={RANKS},zero=3,coshard=2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(block_size=6, n_head=4, n_embd=WIDTH, dropout=0.0, flash=True)
        self.norm1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention(config)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def model() -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    return Layers().double().train(), torch.randn(4, 6, WIDTH, dtype=torch.float64)


def files_of(plan: str) -> Mapping[str, bytes]:
    """The program's files; `kept` after the plan: its loops leave all to autograd."""
    recipe, _, kept = plan.partition(" ")
    compiled = compile_program(*model(), recipe)
    if not kept:
        return compiled.files
    assert compiled.program is not None
    steps = [replace(step, recompute=False) if isinstance(step, Chunks) else step for step in compiled.program.steps]
    made = generate(replace(compiled.program, steps=tuple(steps)))
    return {**made, PROGRAM: compiled.files[PROGRAM]}


@dataclass
class Gathers:
    """What one rank has gathered: bytes by name, the most that was alive at once, and who is alive still."""

    sizes: Counter[str] = field(default_factory=Counter)
    alive: list[tuple[Any, int]] = field(default_factory=list)
    peak: int = 0

    def add(self, gather: Gather, whole: Tensor) -> None:
        self.sizes[gather.name] += whole.nbytes
        if not together(whole, gather.stored):
            self.alive.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        self.alive = [one for one in self.alive if not one[0].expired()]
        return sum(size for _, size in self.alive)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Gathers]:
    """By rank, what has been gathered."""
    found, get = [Gathers() for _ in range(RANKS)], Prefetch.get

    def counted(prefetch: Prefetch, gather: Gather) -> Tensor:
        whole = get(prefetch, gather)
        found[gather.transport.rank].add(gather, whole)
        return whole

    monkeypatch.setattr(Prefetch, "get", counted)
    return found


@pytest.mark.parametrize("plan", [*PLANS, f"{PLANS[1]} kept"])
def test_gathered_once_a_direction_and_let_go(plan: str, gathers: list[Gathers]) -> None:
    files, (module, batch) = files_of(plan), model()
    module(batch).backward()
    matrices = {name: one for name, one in module.named_parameters() if one.ndim == 2}
    # one chunk's parts of the weights of the larger loop, and norms
    most = sum(matrices[f"blocks.0.{name}.weight"].nbytes for name in ("up", "down")) / 2 * 1.1

    def body(transport: Transport) -> list[tuple[dict[str, int], int, int]]:
        parallel, mine = open_rank(files, transport, module), gathers[transport.rank]
        loss = parallel(batch)
        told = [(dict(mine.sizes), mine.now(), mine.peak)]
        mine.sizes.clear()
        loss.backward()
        told.append((dict(mine.sizes), mine.now(), mine.peak))
        for name, parameter in parallel.named_parameters():
            wanted = take(module.get_parameter(name).grad, parallel.stored[name])
            torch.testing.assert_close(parts(parameter.grad), wanted, rtol=1e-9, atol=1e-12)
        return told

    for told in run_ranks(RANKS, body):
        for sizes, left, peak in told:
            assert {name: sizes[name] for name in matrices} == {name: one.nbytes for name, one in matrices.items()}
            assert left == 0 and peak <= most, (left, peak, most)


def train(parallel: Any, batch: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(2):
        parallel.train_step(batch, optimizer)
    return {name: parts(parameter.detach()) for name, parameter in parallel.named_parameters()}


def train_rank(transport: ProcessTransport, files: Mapping[str, bytes]) -> tuple[dict[str, Tensor], Any]:
    module, batch = model()
    parallel = open_rank(files, transport, module)
    return train(parallel, batch), parallel.stored


def test_processes_train_as_one_device(pools: Pools) -> None:
    module, batch = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    for plan in (*PLANS, f"{PLANS[1]} kept"):
        for state, stored in pools(RANKS).run(train_rank, files_of(plan)):
            for name, found in state.items():
                wanted = take(module.get_parameter(name).detach(), stored[name])
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_step_takes_less_than_without_co_shard() -> None:
    module, batch = model()
    # an optimizer that needs no memory: what is seen is forward and backward
    subject = Subject(module, (batch,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False))
    whole, cut = (expect_rank(compile_program(module, batch, plan).files, subject, 0) for plan in (PLAIN, PLANS[0]))
    results = batch.nbytes // RANKS
    # a loop keeps what its norm reads: of each block its input, and the sum in the middle
    assert cut.activations <= whole.activations + (DEPTH + 1) * results + 4096, (cut, whole)
    assert cut.peak < whole.peak, (cut, whole)
