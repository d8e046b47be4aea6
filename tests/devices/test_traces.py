"""A trace of torch's profiler reads like the program: modules with their lines, collectives with what they are for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.devices import traces
from tests.models import GPT, GPTConfig
from tests.pools import Pools
from tests.train.eager import gpt_example
from tests.train.test_disagree import made
from weft.compile.model_file import Subject
from weft.compile.programs import Programs


def program(plan: str) -> tuple[Any, Any, Any]:
    config = GPTConfig(n_layer=2, dropout=0.0)
    model, batch = GPT(config).double(), gpt_example(config)
    files = Programs(lambda module: Subject(model, batch), plan, None, cache=None, outputs="loss").training(model)
    return dict(files), model, batch


@pytest.mark.parametrize("devices", [True, False], ids=["device", "gloo"])
def test_a_step_reads_like_the_program(pools: Pools, devices: bool) -> None:
    for (found,) in pools(2).run(traces.trained, (*program("tp=2"), devices)):
        by_name = dict(found)
        for layer in range(2):
            block = f"transformer.h.{layer}"
            assert by_name[f"{block}.ln_1 models.py:46"][-1] == block
            assert by_name[f"{block}.mlp.c_fc models.py:86"][-1] == block
        sums = [(name, around) for name, around in found if name.startswith("all_reduce") and " in reshard " in name]
        assert any(
            "in transformer.h.1.mlp.c_proj at models.py:86 (program.py:" in name
            and any(one.startswith("transformer.h.1.mlp.c_proj") for one in around)
            for name, around in sums
        ), sums
        # of backward
        back = [name for name, _ in found if "in backward of reshard all_reduce over tp in transformer.h.0." in name]
        assert back and all("at models.py:46" in name for name in back), back


def test_recomputed_and_sharded_weights_have_ranges(pools: Pools) -> None:
    for (found,) in pools(2).run(traces.trained, (*program("dp=2,zero=3,recompute=full"), True)):
        names = [name for name, _ in found]
        assert sum(name == "models.py:86" for name in names) == 4, "two layers, forward and again"
        assert any(name.startswith("all_gather in use of transformer.h.1.") for name in names)
        assert any(name.startswith("reduce_scatter in gradient sync of ") for name in names)


def test_events_of_a_pipeline_have_ranges(pools: Pools) -> None:
    # by shared memory: torch's gloo does not survive a profiler while it sends from rank to rank
    found = pools(2).run(traces.trained, (*made("pp=2,microbatches=2"), False))
    for (ranges,) in found:
        names = [name for name, _ in ranges]
        assert any(name.startswith("F0 of") for name in names) and any(name.startswith("B1 of") for name in names)
