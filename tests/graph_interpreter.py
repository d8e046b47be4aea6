"""Runs a Graph on one device, op by op, with the module's own tensors: what a captured Graph is compared by."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weft.ir.graph import Graph, Op, Ref, Size
from weft.runtime.operators.calls import FUNCTIONS


def run_graph(graph: Graph, module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the graph by name. Parameters are the module's own, so backward fills their `.grad`."""
    values = dict(graph.constants)
    values |= state_of(graph, module)
    values |= inputs_of(graph, example)
    symbols = {symbol: values[name].shape[dim] for symbol, (name, dim) in graph.symbols.items()}
    for op in graph.ops:
        outputs = run_op(op, values, symbols)
        assert len(outputs) == len(op.outputs), f"{op.name} made {len(outputs)} tensors"
        values |= dict(zip(op.outputs, outputs, strict=True))
    return values


def state_of(graph: Graph, module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found = {parameter.tensor: parameters[parameter.names[0]] for parameter in graph.parameters}
    return found | {buffer.tensor: buffers[buffer.names[0]].clone() for buffer in graph.buffers}


def inputs_of(graph: Graph, example: Any) -> dict[str, torch.Tensor]:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    leaves = pytree.tree_leaves((args, kwargs))
    return {item.tensor: leaves[item.index] for item in graph.inputs}


def run_op(op: Op, values: dict[str, torch.Tensor], symbols: dict[str, int] | None = None) -> list[torch.Tensor]:
    """The op's outputs, computed in its own grad mode and autocast."""

    def concrete(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Size):
            return eval(arg.expr, {}, dict(symbols or {}))
        if isinstance(arg, tuple):
            return [concrete(item) for item in arg]
        return arg

    call = op.function or lookup(op.target)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(op.grad))
        if op.autocast is not None:
            stack.enter_context(torch.autocast(op.autocast.device, op.autocast.dtype, op.autocast.enabled))
        result = call(*[concrete(arg) for arg in op.args], **{key: concrete(value) for key, value in op.kwargs})
    return list(result) if isinstance(result, tuple | list) else [result]


def lookup(target: str) -> Any:
    """`torch.ops.aten.add.Tensor` for `aten.add.Tensor`."""
    if target.startswith("weft."):
        return FUNCTIONS[target.removeprefix("weft.")]
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found
