"""One comparison that shares no code with the checker or with `weft verify`.

A small GPT is captured, cut by hand over two batches and two sets of heads, and run on four emulated ranks, each of
which writes its gradients to a file. Plain tensor code reads the files, puts the gradients together and compares them
with those of the eager module.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.capture import capture
from weft.codegen import generate
from weft.ir.graph import Graph
from weft.lower import lower
from weft.plan.plan import Plan
from weft.plan.primitives import cut
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.load import load_program
from weft.runtime.random import Stream

HEADS, WIDTH, VOCABULARY, LENGTH, BATCH = 2, 8, 12, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(self.norm(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.view(-1, VOCABULARY), targets.view(-1), ignore_index=0)


def hand_plan(graph: Graph) -> Plan:
    """Batches along dp; heads, hidden and vocabulary along tp."""
    plan = Plan(graph, 4)
    batch = cut("b0", 2, "dp")
    plan = plan.trans(plan.match("tokens"), batch)
    plan = plan.trans(plan.match("blocks.*.qkv"), batch, cut("n", 2, "tp", groups=3, units=HEADS))
    plan = plan.trans(plan.match("blocks.*.proj"), batch, cut("k", 2, "tp", units=HEADS))
    plan = plan.trans(plan.match("blocks.*.up"), batch, cut("n", 2, "tp"))
    plan = plan.trans(plan.match("blocks.*.down"), batch, cut("k", 2, "tp"))
    return plan.trans(plan.match("head"), batch, cut("n", 2, "tp"))


def part_of(whole: Tensor, intervals: tuple[tuple[tuple[int, int], ...], ...]) -> Tensor:
    for dim, pairs in enumerate(intervals):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in pairs], dim)
    return whole.clone()


def test_gradients_in_files_equal_eager_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyGPT().double()
    ids, targets = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))
    graph = capture(model, (ids, targets))
    files = generate(lower(hand_plan(graph)))

    named = dict(model.named_parameters(remove_duplicate=False))

    def run(transport: Transport) -> float:
        stored = load_program(files, transport).stored
        parts = {name: part_of(named[name].detach(), where) for name, where in stored.items()}
        rank = load_program(files, transport, parts)
        rank.stream = Stream(0, 0, 0)
        loss = rank(ids, targets)
        loss.backward()
        for name, parameter in rank.trained():
            torch.save((stored[name], parameter.grad), tmp_path / f"{name}.{transport.rank}.pt")
        return loss.item()

    losses = run_ranks(4, run)
    loss = model(ids, targets)
    loss.backward()
    assert losses == pytest.approx([loss.item()] * 4, rel=1e-12)

    for parameter in graph.parameters:
        expected = named[parameter.names[0]].grad
        assert expected is not None
        found = sorted(tmp_path.glob(f"{parameter.names[0]}.*.pt"))
        seen = torch.zeros(expected.shape)
        for file in found:
            where, gradient = torch.load(file)
            torch.testing.assert_close(gradient, part_of(expected, where), rtol=1e-10, atol=1e-12)
            marks = torch.arange(expected.numel()).view(expected.shape)
            seen.view(-1)[part_of(marks, where).view(-1)] = 1
        assert seen.all(), f"no rank has all of the gradient of {parameter.names[0]}"
    stored = {tuple(part.shape) for part in (torch.load(f)[1] for f in tmp_path.glob("*.pt"))}
    assert (3 * WIDTH // 2, WIDTH) in stored, "the fused projection is not cut over tp"
