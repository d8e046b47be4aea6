"""Runs the generated code of a Program on emulated ranks and a Graph on one device, and compares the two.

`run_program` gives every rank its parts of the tensors and puts outputs, gradients and buffer updates together again,
copies compared bit for bit. `run_single` knows nothing of rules, layouts or programs: ATen calls, plain autograd, and
random draws replaced by those of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.codegen import generate
from weft.ir.graph import Graph, Op, map_refs
from weft.ir.program import Program
from weft.runtime.layout.transfer import Index
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import ProgramFiles
from weft.runtime.program.load import load_program
from weft.runtime.random import Stream
from weft.verify.draw_mode import DrawMode

TOLERANCE = 1e-10
FLOOR = 1e-3
"""Below it differences are absolute: gradients that are zero in exact arithmetic are rounding on both sides."""
STREAM = Stream(seed=7, step=3, microbatch=1)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Results:
    """What a step leaves behind: outputs by tensor, gradients by parameter, new contents by buffer."""

    outputs: Tensors
    grads: Tensors
    updates: Tensors


class Disagreement(AssertionError):
    """Copies of one value differ, or a value has holes."""


Rank = tuple[Tensors, Tensors, Tensors, Mapping[str, Index]]
"""Of one rank: outputs, gradients by parameter, new contents by buffer, and what it stores of each."""


def run_ranks_of(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    stream: Stream = STREAM,
    *,
    traced: bool = False,
    timeout: float = 60.0,
) -> list[Rank]:
    """Run all ranks in the emulator.

    Args:
        state: whole parameters and buffers.
        inputs: whole inputs.
        traced: through the text that tells what its ops make.
    """
    graph, files = program.graph, ProgramFiles(generate(program, traced=traced))
    names = {one.names[0]: one.tensor for one in (*graph.parameters, *graph.buffers)}
    updated = {one.tensor for one in graph.buffers if one.update is not None}

    def body(transport: Transport) -> Rank:
        stored = load_program(files, transport).stored
        mine = {name: take(state[names[name]], index) for name, index in stored.items() if name in names}
        module = load_program(files, transport, mine)
        module.stream = stream
        made = module(*(inputs[one.tensor] for one in graph.inputs))
        outputs = made if isinstance(made, dict) else {str(graph.loss): made}
        if program.loss is not None:
            outputs[str(graph.loss)].backward()
        grads = {names[name]: one.grad for name, one in module.trained() if one.grad is not None}
        updates = {names[name]: module.part(name) for name in mine if names[name] in updated}
        kept = {names[name]: index for name, index in stored.items() if name in names}
        return {name: one.detach() for name, one in outputs.items()}, grads, updates, kept

    return run_ranks(program.devices, body, timeout=timeout)


def run_program(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    stream: Stream = STREAM,
    *,
    timeout: float = 60.0,
    exact: bool = True,
) -> Results:
    """The same, put together. `exact`: copies must agree bit for bit, not only to rounding."""
    found = run_ranks_of(program, state, inputs, stream, timeout=timeout)
    stored = [one[3] for one in found]
    return Results(
        {name: _agreeing(name, [own[0][name] for own in found], program.graph, exact) for name in program.outputs},
        _together(program.graph, [one[1] for one in found], stored, exact),
        _together(program.graph, [one[2] for one in found], stored, exact),
    )


def take(tensor: Tensor, index: Index) -> Tensor:
    """The part at these intervals per dim, in memory of its own."""
    for dim, intervals in enumerate(index):
        at = [i for start, stop in intervals for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(at, dtype=torch.long))
    return tensor.clone()


def _agreeing(name: str, copies: list[Tensor], graph: Graph, exact: bool) -> Tensor:
    for copy in copies:
        if tuple(copy.shape) != graph.tensors[name].sizes or not _same(copy, copies[0], exact):
            raise Disagreement(f"copies of the output {name} differ")
    return copies[0]


def _same(a: Tensor, b: Tensor, exact: bool) -> bool:
    return torch.equal(a, b) or (not exact and difference(a, b, 0.0) <= TOLERANCE)


def _together(graph: Graph, parts: list[Tensors], stored: list[Mapping[str, Index]], exact: bool) -> Tensors:
    """Whole tensors from the parts of all ranks."""
    found: Tensors = {}
    for name in sorted({name for own in parts for name in own}):
        tensor = graph.tensors[name]
        whole = torch.zeros(tensor.sizes, dtype=tensor.dtype)
        seen = torch.zeros(tensor.sizes, dtype=torch.bool)
        for rank, own in enumerate(parts):
            if name not in stored[rank]:
                continue
            if name not in own:
                raise Disagreement(f"rank {rank} stores {name} but has no gradient or update of it")
            at = _mesh(stored[rank][name])
            known = seen[at]
            if not _same(whole[at][known], own[name][known], exact):
                raise Disagreement(f"copies of what belongs to {name} differ (rank {rank})")
            whole[at] = own[name]
            seen[at] = True
        if not bool(seen.all()):
            raise Disagreement(f"what belongs to {name} has holes")
        found[name] = whole
    return found


def _mesh(index: Index) -> Any:
    if not index:
        return ...
    lists = [torch.tensor([i for s, e in one for i in range(s, e)], dtype=torch.long) for one in index]
    return torch.meshgrid(*lists, indexing="ij")


def run_single(
    graph: Graph, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], stream: Stream = STREAM
) -> Results:
    """Run the graph on one device with plain autograd."""
    values: dict[str, Tensor] = {**inputs, **graph.constants}
    leaves: Tensors = {}
    for name, tensor in state.items():
        parameter = graph.parameter_tensors.get(name)
        trained = parameter is not None and parameter.trainable
        values[name] = tensor.detach().clone().requires_grad_(trained)
        if trained:
            leaves[name] = values[name]
    mode = DrawMode(stream)
    for op in graph.ops:
        results = call(op, values, mode)
        values.update(zip(op.outputs, results, strict=True))
    if graph.loss is not None and values[graph.loss].requires_grad:
        torch.autograd.backward(values[graph.loss])
    return Results(
        {name: values[name].detach() for name in graph.outputs if name is not None},
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        {buffer.tensor: values[buffer.update].detach() for buffer in graph.buffers if buffer.update is not None},
    )


def call(op: Op, values: Mapping[str, Tensor], mode: DrawMode) -> tuple[Tensor, ...]:
    """One op, whole."""
    args = map_refs(op.args, lambda ref: values[ref.name])
    kwargs = {name: map_refs(value, lambda ref: values[ref.name]) for name, value in op.kwargs}
    function = op.function or operator(op.target)
    with torch.enable_grad() if op.grad else torch.no_grad(), mode if op.draw is not None else nullcontext():
        if op.draw is not None:
            mode.num_draws = op.draw
        result = function(*args, **kwargs)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def operator(target: str) -> Any:
    """The ATen overload behind a target."""
    found = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def differences(found: Results, expected: Results) -> dict[str, float]:
    """What differs by more than rounding, with the relative difference. Missing gradients count as zeros."""
    wrong: dict[str, float] = {}
    for kind in ("outputs", "grads", "updates"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        names = mine.keys() & theirs.keys() if kind == "outputs" else mine.keys() | theirs.keys()
        if kind == "outputs" and not names and theirs:
            wrong["outputs"] = math.inf
        floating = [tensor.abs().square().mean().item() for tensor in theirs.values() if tensor.is_floating_point()]
        scale = math.sqrt(sum(floating) / len(floating)) if floating else 0.0
        for name in sorted(names):
            there = theirs.get(name, torch.zeros_like(mine.get(name, torch.zeros(()))))
            here = mine.get(name, torch.zeros_like(there))
            ratio = difference(here, there, scale)
            if not ratio <= TOLERANCE:
                wrong[f"{kind[:-1]} {name}"] = ratio
    return wrong


def difference(here: Tensor, there: Tensor, scale: float) -> float:
    """Largest difference relative to the larger of the tensor's own largest element and the scale."""
    if here.shape != there.shape or here.dtype != there.dtype:
        return math.inf
    if here.numel() == 0 or torch.equal(here, there):
        return 0.0
    if not here.is_floating_point():
        return math.inf
    return (here - there).abs().max().item() / max(there.abs().max().item(), scale, FLOOR)
