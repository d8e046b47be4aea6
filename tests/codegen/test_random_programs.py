"""Random graphs under random plans: generated code gives bit for bit what the interpreter gives, and is formatted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.property.graphs import random_case
from tests.property.harness import STREAM, take
from tests.property.plans import random_plan
from tests.property.sketch import Case
from weft.codegen import emit
from weft.errors import PlanError, RuleError
from weft.ir.program import Program
from weft.lower import lower
from weft.lower.script import scripts
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.program_files import load_program
from weft.runtime.transport import Transport

QUICK, FULL, SHARDS = 80, 2000, 2

Found = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]
"""Outputs, gradients by parameter, buffers after the step."""


def interpreted(program: Program, case: Case) -> list[Found]:
    written = scripts(program)
    everything = {**case.state, **case.inputs, **program.graph.constants}

    def body(transport: Transport) -> Found:
        own = written[transport.rank]
        parts = {name: take(everything[name], index) for name, index in own.stored.items()}
        dtypes = {name: tensor.dtype for name, tensor in everything.items()}
        rank = Rank(own, transport, state=parts, dtypes=dtypes)
        outputs = rank.forward({}, STREAM)
        return outputs, rank.backward(), rank.updates()

    return run_ranks(program.devices, body, timeout=20)


def generated(program: Program, case: Case, directory: Path) -> list[Found]:
    emit(program, directory)
    graph = program.graph
    names = {one.names[0]: one.tensor for one in (*graph.parameters, *graph.buffers)}
    updated = {one.tensor for one in graph.buffers if one.update is not None}

    def body(transport: Transport) -> Found:
        empty = load_program(directory, transport)
        state = {name: take(case.state[names[name]], index) for name, index in empty.stored.items() if name in names}
        module = load_program(directory, transport, state)
        module.stream = STREAM
        made = module(*(case.inputs[one.tensor] for one in graph.inputs))
        outputs = made if isinstance(made, dict) else {str(graph.loss): made}
        if program.loss is not None:
            outputs[str(graph.loss)].backward()
        grads = {names[name]: p.grad for name, p in module.trained() if p.grad is not None}
        buffers = {tensor: module.part(name) for name, tensor in names.items() if tensor in updated}
        return {name: one.detach() for name, one in outputs.items()}, grads, buffers

    return run_ranks(program.devices, body, timeout=20)


def run_seed(seed: int, directory: Path) -> bool:
    """True if the plan could be lowered and the two agree."""
    case = random_case(seed)
    plan = random_plan(case.graph, seed * 7 + 1)
    try:
        program = lower(plan, outputs="all" if seed % 2 else "loss")
        expected = interpreted(program, case)
    except (PlanError, RuleError):
        return False
    for rank, (ours, theirs) in enumerate(zip(generated(program, case, directory), expected, strict=True)):
        for what, mine, wanted in zip(("output", "gradient of", "buffer"), ours, theirs, strict=True):
            assert mine.keys() == wanted.keys(), f"seed {seed}, rank {rank}: {what} {mine.keys()} {wanted.keys()}"
            for name, tensor in mine.items():
                same = torch.equal(tensor.nan_to_num(), wanted[name].nan_to_num())
                assert same, f"seed {seed}, rank {rank}: {what} {name}"
    return True


def run_seeds(seeds: range, folder: Path) -> None:
    run = sum(run_seed(seed, folder / str(seed)) for seed in seeds)
    assert run > len(seeds) / 2
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", "--quiet", "--line-length=120", "--isolated", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs(shard: int, tmp_path: Path) -> None:
    size = QUICK // SHARDS
    run_seeds(range(shard * size, (shard + 1) * size), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(10))
def test_many_random_programs(shard: int, tmp_path: Path) -> None:
    size = FULL // 10
    run_seeds(range(QUICK + shard * size, QUICK + (shard + 1) * size), tmp_path)
