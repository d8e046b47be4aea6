"""Loading a plan from what a user wrote: a recipe string, a plan file, or a function in a Python file.

In: text such as `dp=2,tp=2`, `plan.yaml`, `plans.py:megatron`, and a Graph. Out: a Plan for that Graph. A function
takes the empty plan, or the graph and the number of devices, and returns a Plan; what it raises is kept as the cause.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import PlanError, WeftError
from weft.ir.graph import Graph
from weft.plan.batch import BatchDims
from weft.plan.plan import Plan
from weft.plan.plan_file import ENDS, SUFFIXES, read_plan
from weft.plan.recipes.text import check_devices, parse_recipe


def load_plan(text: str, graph: Graph, devices: int | None = None, *, batch_dims: BatchDims | None = None) -> Plan:
    """The plan that the text means.

    Args:
        text: a recipe string, the path of a plan file, or `path.py:function`.
        graph: what it is for.
        devices: how many; needed by functions, checked against the others.
        batch_dims: of the inputs, for recipes.
    """
    path, colon, function = text.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_function(Path(path), function, graph, devices)
    if text.endswith(SUFFIXES):
        return _same_devices(read_plan(Path(text), graph), devices, text)
    if _is_other_file(text):
        raise PlanError(
            f"{text!r} is no plan file: {ENDS}", remedy="give it such a name, or write a recipe such as dp=2"
        )
    if text.endswith(".py"):
        raise PlanError(f"{text} names no function", remedy=f"write {text}:FUNCTION")
    if not text.strip():
        raise PlanError("the plan is empty", remedy="give a recipe string, a plan file, or path.py:function")
    recipe = parse_recipe(text)
    return recipe.write(Plan(graph, check_devices(recipe, devices, text)), batch_dims=batch_dims)


def _is_other_file(text: str) -> bool:
    """True for what can only be meant as a file: no setting has dots or slashes before its value."""
    path = Path(text)
    return path.suffix != ".py" and (path.is_file() or ("=" not in text and ("." in text or "/" in text)))


def _same_devices(plan: Plan, devices: int | None, text: str) -> Plan:
    if devices is not None and devices != plan.devices:
        raise PlanError(
            f"{text} makes a plan for {plan.devices} devices, but {devices} were asked for",
            remedy=f"ask for {plan.devices} devices, or use another plan",
        )
    return plan


def _from_function(path: Path, name: str, graph: Graph, devices: int | None) -> Plan:
    module = _import(path)
    function = vars(module).get(name)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise PlanError(
            f"{path} has no function {name!r}", place=str(path), remedy=f"functions there: {', '.join(known) or 'none'}"
        )
    plan = _call(function, f"{path}:{name}", graph, devices)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"{path}:{name} returned {type(plan).__name__}, not a Plan",
            place=str(path),
            remedy="return the plan that the last primitive gave back",
        )
    if plan.graph is not graph:
        raise PlanError(
            f"{path}:{name} returned a plan of another graph",
            place=str(path),
            remedy="start from the plan or the graph that is passed in",
        )
    return plan if devices is None else _same_devices(plan, devices, f"{path}:{name}")


def _call(function: Callable[..., Any], place: str, graph: Graph, devices: int | None) -> Any:
    """Call `function(plan)`, `function(graph)` or `function(graph, devices)`, whichever it takes."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    arguments: tuple[Any, ...] = (graph,)
    if names[:1] != ["graph"] or (len(names) > 1 and signature.parameters[names[1]].default is inspect.Parameter.empty):
        if devices is None:
            raise PlanError(
                f"{place} does not say how many devices it is for", place=place, remedy="ask for some: --devices N"
            )
        arguments = (graph, devices) if len(names) > 1 else (Plan(graph, devices),)
    elif len(names) > 1 and devices is not None:
        arguments = (graph, devices)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise PlanError(
            f"{place}{signature} cannot be called with a plan: {error}",
            place=place,
            remedy="define it as function(plan), function(graph) or function(graph, devices)",
        ) from None
    with _user_code(place):
        return function(*arguments)


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise PlanError(f"there is no file {path}", remedy="check the path before the colon")
    spec = importlib.util.spec_from_file_location(f"weft_plan_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with _user_code(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _user_code(place: str) -> Iterator[None]:
    """Around code of the user's: what it raises becomes a PlanError that keeps it as its cause."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ is not None else []
        line = f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
        raise PlanError(
            f"the plan's own code raised {type(error).__name__}: {error}",
            place=place + line,
            remedy="correct the function",
        ) from error
