"""A captured Graph against the eager module: outputs, gradients, buffer updates, and that capture left no trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.graph_interpreter import run_graph
from weft.capture import capture
from weft.capture.example import find_loss, split_example
from weft.ir.graph import Graph
from weft.ir.verify import verify_graph

SEED = 7


def assert_same(module: nn.Module, example: Any, *, tolerance: float = 1e-13, graph: Graph | None = None) -> Graph:
    """Capture, run both, compare everything. Returns the graph."""
    if graph is None:
        before = state_of(module)
        graph = capture(module, example)
        assert_untouched(module, before)
    verify_graph(graph)
    eager, interpreted = copy.deepcopy(module), copy.deepcopy(module)
    args, kwargs = split_example(example)
    torch.manual_seed(SEED)
    outputs = eager(*args, **kwargs)
    torch.manual_seed(SEED)
    values = run_graph(graph, interpreted, example)
    leaves = pytree.tree_leaves(outputs)
    for leaf, name in zip(leaves, graph.outputs, strict=True):
        assert (name is None) == (not isinstance(leaf, Tensor))
        if name is not None:
            assert_close(values[name], leaf, tolerance, name)
    compare_gradients(graph, eager, interpreted, find_loss(outputs), values, tolerance)
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    for buffer in graph.buffers:
        assert_close(values[buffer.update or buffer.tensor], buffers[buffer.names[0]], tolerance, buffer.tensor)
    assert_static_facts(graph, values)
    return graph


def compare_gradients(
    graph: Graph,
    eager: nn.Module,
    interpreted: nn.Module,
    loss: Tensor | None,
    values: dict[str, Tensor],
    tolerance: float,
) -> None:
    assert (loss is None) == (graph.loss is None)
    if loss is None or graph.loss is None or not loss.requires_grad:
        return
    loss.backward()
    values[graph.loss].backward()
    wanted = dict(eager.named_parameters())
    got = dict(interpreted.named_parameters())
    for name, parameter in wanted.items():
        assert (parameter.grad is None) == (got[name].grad is None), f"{name}: one has a gradient, one has none"
        if parameter.grad is not None:
            assert_close(got[name].grad, parameter.grad, tolerance, name)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{name}: {got.shape} {got.dtype}"
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def assert_static_facts(graph: Graph, values: dict[str, Tensor]) -> None:
    """Shapes, dtypes and needs_grad of the graph are those of the run."""
    for name, tensor in graph.tensors.items():
        value = values[name]
        assert tuple(value.shape) == tensor.sizes and value.dtype == tensor.dtype, name
        assert value.requires_grad == tensor.needs_grad, f"{name}: needs_grad is {tensor.needs_grad}"


def state_of(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "ids": {name: id(tensor) for name, tensor in tensors.items()},
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "modes": {name: sub.training for name, sub in module.named_modules()},
        "attributes": {name: dict(vars(sub)) for name, sub in module.named_modules()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "grad": torch.is_grad_enabled(),
    }


def assert_untouched(module: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(module)
    for key in ("ids", "modes", "python", "numpy", "grad"):
        assert after[key] == before[key], f"capture changed {key}"
    assert torch.equal(after["torch"], before["torch"])
    for name, value in before["values"].items():
        assert torch.equal(after["values"][name], value), f"capture changed {name}"
    for name, attributes in before["attributes"].items():
        assert after["attributes"][name].keys() == attributes.keys()
        for key, value in attributes.items():
            assert after["attributes"][name][key] is value, f"capture changed {name}.{key}"
