"""What only a recomputed loop reads runs again with it; regions of which autograd keeps nothing are no regions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.capture import capture
from weft.ir.program import Chunks, Compute, Recompute, Step, Use
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Shared(Block):
    """The norm's result is read after the loop too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def steps_of(kind: type[Block], recipe: str) -> tuple[Step, ...]:
    program = lower(load_plan(recipe, capture(Layers(kind), torch.zeros(4, 8))))
    check(program)
    return tuple(step for step in program.steps if isinstance(step, Compute | Chunks | Recompute))


def test_a_norm_is_recomputed_with_the_loop_that_reads_it() -> None:
    steps = steps_of(Block, "dp=2,zero=3,recompute=blocks.*,coshard=2")
    regions = [step for step in steps if isinstance(step, Recompute)]
    assert len(regions) == 2
    for region in regions:
        norm, loop = region.body
        assert isinstance(norm, Compute) and "norm" in norm.op
        assert isinstance(loop, Chunks) and loop.recompute and loop.ends
    # the sums of the blocks are left to autograd, which keeps nothing of them
    assert sum(isinstance(step, Compute) and "add" in step.op for step in steps) == 2


def test_a_norm_that_others_read_stays_outside() -> None:
    steps = steps_of(Shared, "dp=2,zero=3,recompute=blocks.*,coshard=2")
    loops = [step for step in steps if isinstance(step, Chunks)]
    assert len(loops) == 2 and not any(loop.ends for loop in loops)


def test_what_is_not_to_be_recomputed_stays_outside() -> None:
    steps = steps_of(Block, "dp=2,zero=3,coshard=2")
    assert not any(isinstance(step, Recompute) for step in steps)


def test_a_layer_brings_its_weights_after_the_layer_before() -> None:
    program = lower(load_plan("dp=2,zero=3,recompute=blocks.*", capture(Layers(Block), torch.zeros(4, 8))))
    used = [
        program.values[step.value].tensor if isinstance(step, Use) else "region"
        for step in program.steps
        if isinstance(step, Use | Recompute)
    ]
    first, second = (at for at, what in enumerate(used) if what == "region")
    names = {one.tensor: one.names[0] for one in program.graph.parameters}
    assert {names[what] for what in used[first + 1 : second]} == {
        f"blocks.1.{name}.{kind}" for name in ("norm", "up", "down") for kind in ("weight", "bias")
    }
