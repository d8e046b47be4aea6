"""Subjects: a module with its example, captured and planned.

In: a module or the path of a model file, and whatever describes a plan. Out: a Subject, its Graph, a Plan for it, and
its whole tensors under the names that the Graph has for them. What does not fit together is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from weft.capture import capture
from weft.capture.example import is_marked, split_example
from weft.capture.precision import chosen_precision
from weft.compile.model_file import Subject, inside, load_model_file
from weft.errors import ModelFileError, PlanError, RunError
from weft.ir.graph import Buffer, Graph, Parameter
from weft.ops.arguments import arguments, overload
from weft.ops.precision import widen
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.runtime.weights.precision import Precision

PlanLike = Plan | str | Path | Callable[[Graph], Plan]


@dataclass(frozen=True)
class Whole:
    """Whole tensors before the first step, by tensor name of the Graph."""

    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    trained: tuple[str, ...]
    """Trained parameters, in the order of `module.parameters()`."""
    names: Mapping[str, str]
    """The name under which the reference knows each parameter and buffer."""

    def every(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names in the Graph."""
        yield from self.state.items()
        yield from self.inputs.items()


def make_subject(model_or_file: nn.Module | str | Path, example: Any) -> Subject:
    """The module and its example."""
    if not isinstance(model_or_file, nn.Module):
        return load_model_file(model_or_file)
    if example is None:
        raise ModelFileError(
            f"no example was given for {type(model_or_file).__name__}",
            remedy="pass the batch of one optimizer step: a tuple of arguments or a dict of keyword arguments",
        )
    return Subject(model_or_file, example)


def in_precision(subject: Subject, precision: Precision | str | None) -> Subject:
    """A subject in the precision that was asked for, or in its own."""
    if precision is None:
        return subject
    found = chosen_precision(precision, subject.model, error=RunError, place=f"precision {str(precision)!r}")
    return replace(subject, precision=found)


LOSS_REMEDY = (
    'return a scalar loss that depends on a trained parameter; beside other scalars call it loss: {"loss": loss, ...}'
)


def capture_subject(subject: Subject, *, trains: bool = True) -> Graph:
    """The Graph of a subject; refuses one without a loss if it is to be trained by one."""
    with inside(subject.path, "the forward", only=(SystemExit,)):
        graph = capture(subject.model, subject.example, precision=subject.precision, grad=subject.grad)
    check_dense(graph)
    if trains and (graph.loss is None or not graph.tensors[graph.loss].needs_grad):
        scalars = sum(graph.tensors[name].shape == () for name in graph.outputs if name is not None)
        none = f"it returns {scalars} scalars, none of which is called loss" if scalars else "it returns no scalar"
        raise ModelFileError(
            "the forward gives no loss to train: "
            + (none if graph.loss is None else "its loss depends on no trained parameter"),
            place=subject.place,
            remedy=LOSS_REMEDY,
        )
    return graph


def graph_for(plan: PlanLike, subject: Subject, *, trains: bool = True) -> Graph:
    """The Graph that a plan is about: its own, unless dims of the example were marked since, or a precision chosen."""
    chosen = subject.precision is not None
    if isinstance(plan, Plan) and not chosen and (plan.graph.symbols or not is_marked(subject.example)):
        return plan.graph
    return capture_subject(subject, trains=trains)


def check_dense(graph: Graph) -> None:
    """Refuse sparse gradients: nothing here can add them up."""
    for op in graph.ops:
        if overload(op.target) is not None and arguments(op).get("sparse") is True:
            raise ModelFileError(
                f"{op.kind} gives a sparse gradient, which cannot be summed over devices",
                place=op.place,
                remedy="leave out sparse=True",
            )


def check_fit(graph: Graph, subject: Subject) -> None:
    """Refuse a graph that was captured from another model or another example."""
    found = {name: tuple(held.shape) for name, held in whole_tensors(graph, subject, wide=False).every()}
    wrong = [name for name, shape in found.items() if graph.tensors[name].sizes != shape]
    if wrong:
        shape, sizes = found[wrong[0]], graph.tensors[wrong[0]].sizes
        raise _other_plan(subject, f"model: {wrong[0]} is {list(shape)}, planned as {list(sizes)}")


def _other_plan(subject: Subject, what: str) -> PlanError:
    return PlanError(
        f"the plan is for another {what}",
        place=subject.place,
        remedy="capture this model with this example and plan its graph",
    )


def make_plan(plan: PlanLike, graph: Graph, subject: Subject, devices: int | None) -> Plan:
    """A Plan for the graph, from whatever describes one."""
    if isinstance(plan, str | Path):
        return load_plan(str(plan), graph, devices, batch_dims=subject.batch_dims)
    if isinstance(plan, Plan):
        # what it says is said again of the graph at other sizes
        made = plan if plan.graph is graph else Plan(graph, plan.devices, plan.lines)
    elif callable(plan):
        made = plan(graph)
    else:
        raise PlanError(
            f"the plan is {plan!r}", remedy='a recipe ("dp=2"), a plan file, path.py:function, a Plan, or a function'
        )
    if not isinstance(made, Plan):
        raise PlanError(f"the plan function returned a {type(made).__name__}", remedy="return a Plan")
    if devices is not None and devices < made.devices:
        raise PlanError(f"the plan needs {made.devices} devices, there are {devices}", remedy="give more devices")
    return made


def whole_tensors(graph: Graph, subject: Subject, *, wide: bool) -> Whole:
    """Parameters, buffers, constants and inputs of the user's module."""
    model = subject.model
    first_names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    known = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names: dict[str, str] = {}
    state: dict[str, Tensor] = {}
    named: tuple[Parameter | Buffer, ...] = (*graph.parameters, *graph.buffers)
    for held in named:
        name = next((name for name in held.names if name in first_names), "")
        if not name:
            raise _other_plan(subject, f"model: this one has no {held.names[0]}")
        names[held.tensor], state[held.tensor] = name, known[name].detach()
    state.update(graph.constants)
    leaves, _ = tree_flatten(split_example(subject.example))
    if [one.index for one in graph.inputs] != [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]:
        raise _other_plan(subject, f"example: it has {len(graph.inputs)} tensors in other places")
    inputs = {one.tensor: leaves[one.index].detach() for one in graph.inputs}
    order = {name: position for position, name in enumerate(first_names)}
    trained = sorted((p for p in graph.parameters if p.trainable), key=lambda p: order.get(names[p.tensor], 0))
    return Whole(
        state={name: widen(tensor) if wide else tensor for name, tensor in state.items()},
        inputs={name: widen(tensor) if wide else tensor for name, tensor in inputs.items()},
        trained=tuple(parameter.tensor for parameter in trained),
        names=names,
    )
