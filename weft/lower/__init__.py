"""Plan -> Program: cut ops, bring operands where they are needed, synchronise parameters.

In: a Plan. Out: a Program that lists what every device runs, forward and backward. The passes are named below in the
order they run; `check` proves the result, `script` spells it out for one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.cost.links import Links, default_links
from weft.cost.reshard import Resharder
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ir.layout import Layout, copied_on
from weft.ir.oplayout import OpLayout
from weft.ir.program import Program
from weft.lower.build import Builder, Need
from weft.lower.chains import Chain, chains
from weft.lower.idle import without_idle_gradients
from weft.lower.regions import gather_regions, with_loops_joined
from weft.lower.stored import apply_store, held_on, kept, stored_layout
from weft.ops.book import RuleBook
from weft.ops.derive import Operand
from weft.plan.follow import resolve
from weft.plan.plan import Plan


def lower(
    plan: Plan, *, links: Links | None = None, outputs: str = "loss", stored: Mapping[str, Layout] | None = None
) -> Program:
    """Turn a plan into a Program.

    Args:
        plan: the decisions.
        links: what communication costs; gloo's defaults if not given.
        outputs: "loss" returns the loss alone, "all" every output of the model, whole, on every device; backward starts
            from the loss. "open" returns every output too, and backward starts from gradients that the caller gives.
        stored: where parameters lie; as the plan has it if not given.
    """
    if plan.stages or plan.microbatches > 1:
        raise PlanError(
            "the plan runs a step in micro-batches, piece by piece, and this asks for one program of the whole batch",
            remedy="leave out pp and microbatches here; weft verify takes them",
        )
    graph = without_idle_gradients(plan.graph, outputs)
    book = plan.rules
    layouts = resolve(plan, book)
    resharder = Resharder(links or default_links("gloo"))
    lying = {**store_tensors(plan, layouts, book, resharder), **(stored or {})}
    builder = Builder(graph, layouts, book, resharder, lying)
    entries = {one.tensor: builder.enter(one.tensor) for one in graph.inputs if graph.tensors[one.tensor].needs_grad}
    for item in chains(graph, layouts, book):
        if isinstance(item, Chain):
            builder.chain(item)
        else:
            builder.compute(item)
    returned = _return(plan, builder, outputs)
    updates = {
        buffer.tensor: builder.fetch(buffer.update, Need(lying[buffer.tensor], None))
        for buffer in graph.buffers
        if buffer.update is not None
    }
    # gradients become complete in the reverse order of use
    for parameter in reversed(_in_order_of_use(graph)):
        builder.sync(parameter)
    program = Program(
        graph=graph,
        devices=plan.devices,
        values=builder.values,
        steps=gather_regions(builder.steps),
        stored=lying,
        outputs=returned,
        loss=None if graph.loss is None or outputs == "open" else _root(graph, builder),
        roots=tuple(value for name, value in returned.items() if outputs == "open" and graph.tensors[name].needs_grad),
        entries=entries,
        updates=updates,
        kept=kept(plan.stores, lying),
    )
    return with_loops_joined(program)


def stored_parameters(plan: Plan, *, links: Links | None = None) -> dict[str, Layout]:
    """Where a plan stores parameters, for a program of another form on the same weights."""
    resharder = Resharder(links or default_links("gloo"))
    found = store_tensors(plan, resolve(plan, plan.rules), plan.rules, resharder)
    return {name: layout for name, layout in found.items() if name in plan.graph.parameter_tensors}


def _return(plan: Plan, builder: Builder, outputs: str) -> dict[str, str]:
    """Outputs whole on every device. A gradient that comes from the caller is the same there."""
    tensors, every = plan.graph.tensors, tuple(range(plan.devices))
    returned: dict[str, str] = {}
    for name in [plan.graph.loss] if outputs == "loss" else plan.graph.outputs:
        if name is not None and name not in returned:
            whole = copied_on(tensors[name].sizes, every)
            returned[name] = builder.fetch(
                name, Need(whole, whole if outputs == "open" and tensors[name].needs_grad else None)
            )
    return returned


def _root(graph: Graph, builder: Builder) -> str | None:
    """The value that backward starts from, where an op made it and a gradient flows."""
    assert graph.loss is not None
    if graph.loss not in graph.producers or not graph.tensors[graph.loss].needs_grad:
        return None
    return builder.made(graph.loss)


def store_tensors(
    plan: Plan, layouts: Mapping[str, OpLayout], book: RuleBook, resharder: Resharder
) -> dict[str, Layout]:
    """Where every tensor that no op makes lies before the step."""
    graph, every = plan.graph, tuple(range(plan.devices))
    stored: dict[str, Layout] = {}
    for name, tensor in graph.tensors.items():
        if name not in graph.producers and name not in graph.parameter_tensors:
            stored[name] = copied_on(tensor.sizes, every)
    uses = _uses(graph, layouts, book)
    for parameter in graph.parameters:
        tensor = graph.tensors[parameter.tensor]
        layout = stored_layout(
            tensor.sizes, uses.get(parameter.tensor, ()), tensor.dtype.itemsize, plan.devices, resharder
        )
        store = plan.stores.get(parameter.tensor)
        if store is not None and store.devices is not None:
            stored[parameter.tensor] = held_on(layout, store.devices, plan.devices, parameter, store.place)
            continue
        stored[parameter.tensor] = layout if store is None else apply_store(layout, store, parameter)
    return stored


def _uses(graph: Graph, layouts: Mapping[str, OpLayout], book: RuleBook) -> dict[str, tuple[Operand, ...]]:
    """For each parameter the distinct ways in which ops use it."""
    found: dict[str, dict[Operand, None]] = {}
    for op in graph.ops:
        if not any(name in graph.parameter_tensors for name in op.inputs):
            continue
        for name, operand in zip(op.inputs, book.operands(op, layouts[op.name]).inputs, strict=True):
            if name in graph.parameter_tensors:
                found.setdefault(name, {})[operand] = None
    return {name: tuple(operands) for name, operands in found.items()}


def _in_order_of_use(graph: Graph) -> list[str]:
    """Trained parameters that have a gradient, in the order ops first read them."""
    order = dict.fromkeys(name for op in graph.ops for name in op.inputs if name in graph.parameter_tensors)
    return [name for name in order if graph.parameter_tensors[name].trainable and graph.tensors[name].needs_grad]
