"""parallelize(): from an ordinary module to this rank's share of it.

In: a module (or a function that makes it), an example, a plan. Out: under torchrun the rank's module, with
`emulate=True` a module with all ranks as threads of this process; both are called, trained and saved alike:

    parallel = weft.parallelize(model, example, plan="dp=2,tp=2")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    loss = parallel.train_step(batch, optimizer)

Promised: every rank starts from its parts of the values that the module has, and all ranks run one program, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.compile import compile_program
from weft.errors import PlanError, RunError
from weft.ir.graph import Graph
from weft.ir.program import Program
from weft.ir.show import show_graph
from weft.ir.show_program import show_program
from weft.lower.script import scripts
from weft.runtime.alone import Alone
from weft.runtime.connect import connect, is_launched
from weft.runtime.initialise import build
from weft.runtime.replicas import Replica
from weft.runtime.script import Index, Script
from weft.runtime.transport import Transport
from weft.train.emulated import Emulated
from weft.train.interpreted import Interpreted
from weft.train.weights import Weights, held_tensors, load_parts
from weft.verify.door import PlanLike

Model = nn.Module | Callable[[], nn.Module]


def parallelize(
    model: Model,
    example: Any,
    plan: PlanLike,
    *,
    emulate: bool = False,
    devices: int | None = None,
    seed: int = 0,
    weights: Weights | None = None,
) -> nn.Module:
    """Draw a module across devices.

    Args:
        model: a module whose forward returns a scalar loss, or a function that makes it.
        example: a batch of one optimizer step; every batch has its form.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        emulate: run all ranks as threads of this process.
        devices: how many the plan is for; as many as it needs if not given. A job of k times as many ranks trains k
            replicas, each on its own batches, with averaged gradients.
        seed: of the random streams, and of the generator while `model()` is called, if it is a function.
        weights: where the values come from, if not from the module: a state dict, or files of one.
    """
    module = model if isinstance(model, nn.Module) else build(model, seed)
    compiled = compile_program(module, example, plan, devices)
    program, written = compiled.program, scripts(compiled.program)

    def make(transport: Transport) -> nn.Module:
        replica = Replica(transport, program.devices)
        mine = written[replica.rank]
        state = load_parts(module if weights is None else weights, program.graph, mine.stored)
        return Interpreted(mine, replica, program.graph, state, seed=seed)

    if emulate:
        stored = [stored_by_name(program.graph, one) for one in written]
        return Emulated(make, stored, shapes_by_name(program.graph))
    transport = join_job(program)
    refuse_different(transport, program)
    return make(transport)


def join_job(program: Program) -> Transport:
    """This process's way to the other ranks; refuses a job of the wrong size."""
    if not is_launched():
        if program.devices == 1:
            return Alone()
        raise RunError(
            f"the plan needs {program.devices} processes, and this one is alone",
            remedy=f"torchrun --nproc-per-node {program.devices} SCRIPT, or parallelize(..., emulate=True)",
        )
    transport = connect()
    if transport.num_ranks % program.devices:
        raise PlanError(
            f"the plan is for {program.devices} devices, the job has {transport.num_ranks} processes",
            remedy=f"start a multiple of {program.devices}, or choose another plan",
        )
    return transport


def refuse_different(transport: Transport, program: Program) -> None:
    """All ranks must have compiled the same program: they are to meet in its collectives."""
    text = show_graph(program.graph) + show_program(program)
    mine = hashlib.sha256(text.encode()).digest()
    everybody = tuple(range(transport.num_ranks))
    found = transport.all_gather(torch.tensor(list(mine), dtype=torch.uint8, device=transport.device), everybody)
    other = next((rank for rank, theirs in enumerate(found) if bytes(theirs.tolist()) != mine), None)
    if other is not None:
        raise RunError(
            f"ranks {transport.rank} and {other} have compiled different programs",
            remedy="give every rank the same model, example and plan: nothing in them may depend on the rank",
        )


def stored_by_name(graph: Graph, script: Script) -> dict[str, Index]:
    """What a rank stores of parameters and buffers, by dotted name."""
    return {
        name: script.stored[held.tensor]
        for held in held_tensors(graph)
        if held.tensor in script.stored
        for name in held.names
    }


def shapes_by_name(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The whole shapes of parameters and buffers, by dotted name."""
    return {name: graph.tensors[held.tensor].sizes for held in held_tensors(graph) for name in held.names}
