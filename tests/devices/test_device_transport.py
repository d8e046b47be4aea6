"""The transport of devices, over gloo on true processes: what the emulator gives, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.devices import bodies
from tests.models import GPT, GPTConfig
from tests.pools import Pools
from tests.processes import bodies as known
from weft.compile import compile_subject
from weft.compile.model_file import Subject
from weft.runtime.links.emulator import run_ranks
from weft.runtime.program.files import files_of
from weft.verify.compare import compare
from weft.verify.generated import _joined, _make_task, run_generated


def check_like_emulator(pool: Any, name: str) -> list[Any]:
    found = pool.run(bodies.run, name)
    body = getattr(bodies, name, None) or getattr(known, name)
    wanted = run_ranks(pool.num_ranks, lambda transport: body(transport, None))
    ours, theirs = tree_leaves(found), tree_leaves(wanted)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        tolerance = bodies.ROUNDING.get(a.dtype, 1e-12)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["everything", "shards", "rows", "sums", "letters", "told"])
def test_every_call_is_the_emulators(pools: Pools, num_ranks: int, name: str) -> None:
    check_like_emulator(pools(num_ranks), name)


@pytest.mark.parametrize("name", ["uneven", "disjoint"])
def test_exchanges(pools: Pools, name: str) -> None:
    check_like_emulator(pools(4), name)


def test_parts_of_different_length(pools: Pools) -> None:
    check_like_emulator(pools(3), "positions")


def test_groups_need_no_common_history(pools: Pools) -> None:
    found = pools(4).run(bodies.run, "many_groups")
    assert [[int(x) for x in one] for one in found] == [[1, 2, 4, 4], [1, 3, 4, 4], [5, 2, 3, 4], [5, 4, 4]]


def test_a_group_of_others(pools: Pools) -> None:
    assert pools(2).run(bodies.run, "outside") == [
        f"rank {rank} entered a collective of group (5, 6), which it is not in" for rank in range(2)
    ]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "megatron=2,sp", "dp=2,zero=3", "pp=2,microbatches=2"])
def test_training_is_the_emulators(pools: Pools, plan: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(32, (4, 8))
    subject = Subject(GPT(GPTConfig(dropout=0.0)), (ids, ids))
    compiled = compile_subject(subject, plan)
    files = files_of(compiled.files)
    wanted = run_generated(files, compiled.graph, subject, seed=0, wide=True)
    task = _make_task(files, compiled.graph, subject, seed=0, wide=True, reference=None, travels=True)
    found = _joined(task, pools(2).run(bodies.trained, task))
    assert max(one.value for one in compare(found, wanted)) < 1e-9
