"""Parameters that get other memory in the first steps: copies follow, and what looks at the old one is warned of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft

ROWS, WIDTH = 8, 24


class Shared(nn.Module):
    """The first and the last stage use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx)
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(F.linear(x, self.table.weight), targets)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(50, (ROWS,), generator=made), torch.randint(50, (ROWS,), generator=made)


def made() -> Shared:
    torch.manual_seed(0)
    return Shared().double()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved,virtual=2"])
def test_copies_of_several_stages_stay_one(stage: int, schedule: str) -> None:
    plan = f"dp=2,pp=2,microbatches=2,schedule={schedule},zero={stage}"
    parallel, eager = weft.parallelize(made(), batch(0), plan=plan, emulate=True, cache=None), made()
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.05) for one in (parallel, eager))
    for seed in range(4):
        found = parallel.train_step(batch(seed), ours)
        theirs.zero_grad()
        loss = eager(*batch(seed))
        loss.backward()
        theirs.step()
        assert abs(found - loss.detach()) < 1e-9, seed
    for name, one in parallel.state_dict().items():
        assert torch.allclose(one, eager.state_dict()[name], rtol=0, atol=1e-9), name


def test_what_looks_at_the_old_memory_is_warned_of() -> None:
    parallel = weft.parallelize(made(), batch(0), plan="dp=2,zero=1", emulate=True, cache=None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    kept = [one.detach() for one in parallel.parameters()]
    with pytest.warns(UserWarning, match="lies in other memory since it was first used.*take it anew"):
        for seed in range(3):
            parallel.train_step(batch(seed), optimizer)
    assert len(kept) > 0


@pytest.mark.parametrize(
    "plan", ["dp=2,zero=1", "dp=2,zero=3", "dp=2", "dp=2,pp=2,microbatches=2,schedule=zb-v,zero=1"]
)
def test_nobody_else_is(plan: str) -> None:
    parallel = weft.parallelize(made(), batch(0), plan=plan, emulate=True, cache=None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            parallel.train_step(batch(seed), optimizer)
