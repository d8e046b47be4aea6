"""A Program for one piece of a model, which may be all of it.

In: the piece's graph, a layout for each of its ops on devices counted from 0, where what it takes lies. Out: where
everything that none of its ops makes is stored, and the Program: the ops in order, chains of them chunk by chunk,
operands brought to where they are needed, updates of buffers, gradients brought to where parameters are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weft.cost.links import Links, default_links
from weft.cost.reshard import Resharder
from weft.ir.graph import Graph
from weft.ir.layout import Layout, copied_on
from weft.ir.oplayout import OpLayout
from weft.ir.program import Program
from weft.lower.build import Builder, Need
from weft.lower.chains import Chain, chains
from weft.lower.regions import gather_regions, with_loops_joined
from weft.lower.stored import apply_store, held_on, kept, stored_layout
from weft.ops.derive import Operand
from weft.plan.plan import Plan

Needs = Mapping[str, Need]


@dataclass(frozen=True)
class Lowering:
    """What all pieces of a plan are lowered with."""

    plan: Plan
    resharder: Resharder

    @classmethod
    def of(cls, plan: Plan, links: Links | None) -> Lowering:
        """`links`: what communication costs; gloo's defaults if not given."""
        return cls(plan, Resharder(links or default_links("gloo")))

    def store(
        self, graph: Graph, layouts: Mapping[str, OpLayout], devices: int, taken: Mapping[str, Layout] | None = None
    ) -> dict[str, Layout]:
        """Where every tensor that no op makes is before the step.

        Args:
            taken: where what other pieces make is to come.
        """
        every = tuple(range(devices))
        stored = {
            name: copied_on(tensor.sizes, every)
            for name, tensor in graph.tensors.items()
            if name not in graph.producers and name not in graph.parameter_tensors
        }
        stored.update(taken or {})
        uses = self.uses(graph, layouts, graph.parameter_tensors)
        for parameter in graph.parameters:
            tensor = graph.tensors[parameter.tensor]
            layout = stored_layout(
                tensor.sizes, uses.get(parameter.tensor, ()), tensor.dtype.itemsize, devices, self.resharder
            )
            store = self.plan.stores.get(parameter.tensor)
            if store is not None and store.devices is not None:
                layout = held_on(layout, store.devices, devices, parameter, store.place)
            elif store is not None:
                layout = apply_store(layout, store, parameter)
            stored[parameter.tensor] = layout
        return stored

    def uses(
        self, graph: Graph, layouts: Mapping[str, OpLayout], names: Iterable[str]
    ) -> dict[str, tuple[Operand, ...]]:
        """For each of these tensors the distinct ways in which ops use it, in order."""
        wanted, found = frozenset(names), dict[str, dict[Operand, None]]()
        for op in graph.ops:
            if wanted.isdisjoint(op.inputs):
                continue
            for name, operand in zip(op.inputs, self.plan.rules.operands(op, layouts[op.name]).inputs, strict=True):
                if name in wanted:
                    found.setdefault(name, {})[operand] = None
        return {name: tuple(operands) for name, operands in found.items()}

    def program(
        self,
        graph: Graph,
        layouts: Mapping[str, OpLayout],
        devices: int,
        stored: Mapping[str, Layout],
        *,
        entering: Iterable[str],
        returned: Callable[[Builder], Needs],
        given: bool = False,
        roots: bool = True,
    ) -> Program:
        """The Program.

        Args:
            entering: inputs whose gradients go back to the caller.
            returned: outputs, and how they are to be there.
            given: they cross to other pieces in these layouts.
            roots: backward starts from gradients of the outputs that need one; otherwise from the loss.
        """
        builder = Builder(graph, layouts, self.plan.rules, self.resharder, stored)
        entries = {name: builder.enter(name) for name in entering}
        for item in chains(graph, layouts, self.plan.rules):
            if isinstance(item, Chain):
                builder.chain(item)
            else:
                builder.compute(item)
        needs = returned(builder)
        outputs = {name: builder.fetch(name, need) for name, need in needs.items()}
        updates = {
            buffer.tensor: builder.fetch(buffer.update, Need(stored[buffer.tensor], None))
            for buffer in graph.buffers
            if buffer.update is not None
        }
        # gradients become complete in the reverse order of use
        for parameter in reversed(_in_order_of_use(graph)):
            builder.sync(parameter)
        program = Program(
            graph=graph,
            devices=devices,
            values=builder.values,
            steps=gather_regions(builder.steps),
            stored=stored,
            outputs=outputs,
            loss=None if roots else _root(graph, builder),
            roots=tuple(value for name, value in outputs.items() if roots and graph.tensors[name].needs_grad),
            entries=entries,
            updates=updates,
            kept=kept(self.plan.stores, stored),
            given={name: need.layout for name, need in needs.items()} if given else {},
        )
        return with_loops_joined(program)


def _root(graph: Graph, builder: Builder) -> str | None:
    """The value that backward starts from, where an op made it and a gradient flows."""
    if graph.loss is None or graph.loss not in graph.producers or not graph.tensors[graph.loss].needs_grad:
        return None
    return builder.made(graph.loss)


def _in_order_of_use(graph: Graph) -> list[str]:
    """Trained parameters, in the order ops first read them."""
    order = dict.fromkeys(name for op in graph.ops for name in op.inputs if name in graph.parameter_tensors)
    return [name for name in order if graph.parameter_tensors[name].trainable]
