"""The last step: dead ops and those that compute nothing out, constants marked, masks looked at, final names given.

Enters: the builder's ops under working names. Leaves: the Graph. Names are `path@call/operator`, numbered where an
operator repeats, so that they stay when other modules change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.capture.builder import Builder
from weft.capture.causal import with_plain_masks
from weft.capture.example import Example, Output
from weft.capture.noops import without_noops
from weft.capture.state import Constant, State, Stored
from weft.ir.graph import Buffer, Graph, Input, Op, Parameter, Ref, Size, with_refs


@dataclass
class Names:
    """Unique names: the first taker gets the plain one, later ones `_1`, `_2` ..."""

    taken: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def take(self, wanted: str) -> str:
        name = wanted
        while name in self.taken:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = f"{wanted}_{self.counts[wanted]}"
        self.taken.add(name)
        return name


def assemble(
    module: nn.Module, example: Example, output: Output, state: State, builder: Builder, results: Sequence[str]
) -> Graph:
    """The Graph from all its pieces. `results` are working names of the output tensors."""
    updates = {stored.name: stored.handle.name for stored in state.buffers if is_updated(stored) and stored.handle}
    returned = iter(results)
    outputs = tuple(next(returned) if is_tensor else None for is_tensor in output.tensors)
    wanted = {*results, *updates.values()}
    ops = without_noops(live(builder.ops, wanted), builder.tensors, wanted)
    ops = mark_constants(ops, state, updates)
    baked = {constant.name: constant.value for constant in state.constants}
    ops = live(with_plain_masks(ops, builder.tensors, baked), wanted)
    used = wanted | {name for op in ops for name in op.inputs}
    constants = [constant for constant in state.constants if constant.name in used]
    named_ops, names = final_names(ops, state, example, constants)
    return Graph(
        name=type(module).__name__,
        tensors={new: replace(builder.tensors[old], name=new) for old, new in names.items()},
        inputs=tuple(Input(names[name], example.wheres[i], example.tensors[i]) for i, name in enumerate(state.inputs)),
        parameters=tuple(
            Parameter(names[stored.name], stored.names, stored.value.requires_grad, stored.name in used)
            for stored in state.parameters
        ),
        buffers=tuple(
            Buffer(names[stored.name], stored.names, stored.persistent, named(updates.get(stored.name), names))
            for stored in state.buffers
        ),
        constants={names[constant.name]: constant.value for constant in constants},
        ops=named_ops,
        outputs=tuple(named(name, names) for name in outputs),
        loss=None if output.loss is None else named(outputs[output.loss], names),
        in_spec=example.spec,
        out_spec=output.spec,
        leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in example.leaves),
        out_leaves=output.leaves,
        symbols=symbols_of(state, builder, names),
    )


def is_updated(stored: Stored) -> bool:
    return stored.handle is not None and stored.handle.cell.version > 0


def named(name: str | None, names: Mapping[str, str]) -> str | None:
    return None if name is None else names[name]


def live(ops: Sequence[Op], wanted: set[str]) -> list[Op]:
    """Ops that some wanted tensor depends on."""
    needed = set(wanted)
    kept = []
    for op in reversed(ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def mark_constants(ops: Sequence[Op], state: State, updates: Mapping[str, str]) -> list[Op]:
    """Mark ops that give the same in every step: no input, parameter, updated buffer, draw or dynamic size."""
    varying = {*state.inputs, *(stored.name for stored in state.parameters), *updates}
    marked = []
    for op in ops:
        changes = op.draw is not None or has_size((op.args, op.kwargs)) or not varying.isdisjoint(op.inputs)
        if changes:
            varying.update(op.outputs)
        marked.append(replace(op, constant=not changes))
    return marked


def has_size(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return any(has_size(item) for item in arg)
    return isinstance(arg, Size)


def final_names(
    ops: Sequence[Op], state: State, example: Example, constants: Sequence[Constant]
) -> tuple[tuple[Op, ...], dict[str, str]]:
    """Ops with final names, and working name -> final name of every tensor."""
    unique = Names()
    names = {stored.name: unique.take(stored.names[0]) for stored in (*state.parameters, *state.buffers)}
    names |= {name: unique.take(label) for name, label in zip(state.inputs, example.names, strict=True)}
    names |= {constant.name: unique.take(constant.label) for constant in constants}
    renamed = []
    for op in ops:
        name = unique.take(f"{op.address}/{op.kind}" if op.address else op.kind)
        if len(op.outputs) == 1:
            names[op.outputs[0]] = name
        else:
            names |= {output: f"{name}:{k}" for k, output in enumerate(op.outputs)}
        renamed.append(rename(op, name, names))
    return tuple(renamed), names


def rename(op: Op, name: str, names: Mapping[str, str]) -> Op:
    def final(ref: Ref) -> Ref:
        return Ref(names[ref.name])

    return replace(with_refs(op, final), name=name, outputs=tuple(names[output] for output in op.outputs))


def symbols_of(state: State, builder: Builder, names: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Each symbol with the input and dim that give its value."""
    found: dict[str, tuple[str, int]] = {}
    for name in state.inputs:
        for dim, size in enumerate(builder.tensors[name].shape):
            if isinstance(size, Size):
                found.setdefault(size.expr, (names[name], dim))
    return found
