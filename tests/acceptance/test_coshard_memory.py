"""Co-shard's reason to be: cut four ways on one device, a block needs about a quarter of the transient memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import CausalSelfAttention, GPTConfig
from weft.capture import capture
from weft.codegen import generate
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.load import load_program
from weft.runtime.random import Stream


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that ops make while it is on, and remembers the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live and storage.nbytes():
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


class Block(nn.Module):
    """Attention and MLP as in GPT, a sum at the end."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(config)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        x = x + self.proj(torch.nn.functional.gelu(self.fc(x)))
        return x.sum()


def peak_of(plan: Plan, module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Peak of the bytes alive in one step beyond what is stored, and the loss."""
    program = lower(plan)
    check(program)
    files = generate(program)
    state = {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}

    def body(transport: Transport) -> tuple[int, Tensor]:
        rank = load_program(files, transport, state)
        rank.stream = Stream(0, 0, 0)
        gc.collect()
        with PeakMemory() as memory:
            loss = rank(x)
            loss.backward()
        return memory.peak, loss.detach()

    (result,) = run_ranks(1, body)
    return result


def test_four_chunks_need_a_quarter_of_the_memory() -> None:
    torch.manual_seed(0)
    config = GPTConfig(block_size=192, n_head=4, n_embd=32, dropout=0.1, flash=False)
    module, x = Block(config).train(), torch.randn(2, 192, 32)
    graph = capture(module, (x,))
    whole, loss = peak_of(Plan(graph, 1), module, x)
    chunked, same = peak_of(load_plan("coshard=4", graph), module, x)
    torch.testing.assert_close(same, loss)
    assert chunked <= 1.3 / 4 * whole, f"{chunked} of {whole} bytes: {chunked / whole:.3f}"
