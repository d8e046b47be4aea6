"""What an op costs in a layout, by itself: so that costs can be added up without a program.

In: an op of a graph, an OpLayout. Out: an OpCost: the kernels of its forward and backward on the fullest cell, the
collectives inside it, and what autograd keeps of it. The op's local call runs on tensors without content, as rules are
tried (`weft/ops/trial.py`). Ops that a rule cannot tell apart, with parts of the same shapes, are looked at once.

    step = sum of kernels + what reshards and weights cost        kept = bytes of the storages that some op keeps

Sums are exact where a program does nothing else: what it fuses, writes into buckets or runs in chunks is the
recorder's matter (`record.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cost.compute.kernel import Kernel, kernel_of
from weft.ir.graph import Graph, Op
from weft.ir.layout import Cell
from weft.ir.oplayout import OpLayout
from weft.ops.book import RuleBook
from weft.ops.derive import cell_view
from weft.ops.rule import Call
from weft.ops.trial import gradients_of, run
from weft.ops.work import is_alias
from weft.runtime.checks.max_shape_mode import MaxShapeMode
from weft.runtime.links.transport import GroupComm
from weft.runtime.random import Stream
from weft.simulate.recorded import RecordedTransport
from weft.simulate.trace import BACKWARD, FORWARD, Event, Issue, Place


@dataclass(frozen=True)
class OpCost:
    """What one op takes on the fullest device.

    Args:
        forward, backward: kernels, in order. collectives: inside of the op.
        keeps: bytes of what it makes for backward beside its outputs.
        keeps_inputs, keeps_outputs: positions of operands and results that backward needs.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    collectives: tuple[Issue, ...]
    keeps: int
    keeps_inputs: frozenset[int]
    keeps_outputs: frozenset[int]

    def seconds(self, time: Callable[[Kernel], float]) -> tuple[float, float]:
        """Of forward and of backward, without collectives."""
        return sum(map(time, self.forward)), sum(map(time, self.backward))


class _Kernels(TorchDispatchMode):
    """Lists the kernels that are called, but for those that carry collectives."""

    def __init__(self, transport: RecordedTransport) -> None:
        super().__init__()
        self.found: list[Kernel] = []
        self._transport = transport

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = None if self._transport.is_carrying else kernel_of(func, args, kwargs or {}, result)
        self.found += [] if kernel is None else [kernel]
        return result


class OpCosts:
    """Costs of the ops of a graph."""

    def __init__(self, graph: Graph, rules: RuleBook) -> None:
        self.graph, self.rules = graph, rules
        self._known: dict[Any, OpCost] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def of(self, op: Op, layout: OpLayout) -> OpCost:
        """The cost of an op that is cut so."""
        lying = self.rules.operands(op, layout)
        cell = (0,) * len(layout.grid.axes)
        shapes = tuple(one.layout.part(cell).shape for one in lying.inputs)
        talks = layout if self.rules.rule(op, layout.algorithm).algorithms else None
        key = (self.rules.form(op), layout.algorithm, layout.uses if talks is None else talks, shapes)
        if key not in self._known:
            self._known[key] = self._looked_at(op, layout, cell, shapes)
        return self._known[key]

    def _looked_at(self, op: Op, layout: OpLayout, cell: Cell, shapes: Sequence[tuple[int, ...]]) -> OpCost:
        rule = self.rules.rule(op, layout.algorithm)
        call = None if rule.local is None else _drawing(rule.local(op, cell_view(rule, layout, cell)))
        events: list[Event] = []
        place = [Place(FORWARD)]
        transport = RecordedTransport(
            layout.grid.device(cell), max(layout.grid.devices) + 1, events, lambda: place[0], by_block=True
        )
        kept: list[Tensor] = []
        with self._fake, MaxShapeMode(), _Kernels(transport) as kernels:
            values = [self._leaf(name, shape) for name, shape in zip(op.inputs, shapes, strict=True)]
            kernels.found.clear()
            comms = {name: GroupComm(transport, layout.peers(name, cell)) for name in layout.cut_names}

            def keep(tensor: Tensor) -> Tensor:
                kept.append(tensor)
                return tensor

            with saved_tensors_hooks(keep, lambda tensor: tensor):
                results = run(op, values, call, comms)
            forward, place[0] = tuple(kernels.found), Place(BACKWARD)
            cotangents = [torch.empty_like(one) for one in results]
            kernels.found.clear()
            gradients_of(results, cotangents, values)
            backward = tuple(kernels.found)
        issues = tuple(event for event in events if isinstance(event, Issue))
        return OpCost(forward, backward, issues, *_kept(kept, values, results))

    def _leaf(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.graph.tensors[name]
        made = torch.empty(shape, dtype=tensor.dtype)
        return made.requires_grad_(tensor.needs_grad and (made.is_floating_point() or made.is_complex()))


def _drawing(call: Call) -> Call:
    """The call, with a stream if it draws numbers."""
    draws = any(name == "draw" for name, _ in call.kwargs)
    return replace(call, kwargs=(*call.kwargs, ("stream", Stream(0, 0, 0)))) if draws else call


def _kept(kept: Iterable[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[int, Any, Any]:
    """Bytes of storages that are neither of inputs nor of results; and which of these are kept."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept}
    given = [one.untyped_storage()._cdata for one in inputs]
    made = [one.untyped_storage()._cdata for one in results]
    own = sum(size for key, size in storages.items() if key not in given and key not in made)
    return (
        own,
        frozenset(at for at, key in enumerate(given) if key in storages),
        frozenset(at for at, key in enumerate(made) if key in storages and key not in given),
    )


def kept_bytes(graph: Graph, layouts: Mapping[str, OpLayout], costs: OpCosts) -> int:
    """Bytes of activations that are kept between forward and backward on the fullest device, each storage once."""
    root = {name: name for name in graph.tensors}
    for op in graph.ops:
        if is_alias(op, graph):
            root.update(dict.fromkeys(op.outputs, root[op.inputs[0]]))
    sizes: dict[str, int] = {}
    total, kept = 0, set[str]()
    for op in graph.ops:
        layout = layouts[op.name]
        found, lying = costs.of(op, layout), costs.rules.operands(op, layout)
        cell = (0,) * len(layout.grid.axes)
        for name, one in zip(op.outputs, lying.outputs, strict=True):
            shape = one.layout.part(cell).shape
            sizes.setdefault(root[name], torch.Size(shape).numel() * graph.tensors[name].dtype.itemsize)
        total += found.keeps
        kept |= {root[op.inputs[at]] for at in found.keeps_inputs} | {
            root[op.outputs[at]] for at in found.keeps_outputs
        }
    # parameters, buffers and inputs are there anyway
    return total + sum(sizes[name] for name in kept if name in sizes)
