"""`weft ops FILE`: what a model is made of, and what of it may be cut.

In: the options. Out: a table of operators, the heaviest first, with their rules and what these mean, and what share of
the work a plan (`--plan`, `tp=2` if not given) divides, with the rest by name; with `--cluster` how long they take on
its devices, each by itself; with `--json` the same as plain values. A recipe that finds nothing to cut is told, and is
no error. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from rich.console import Console

from weft.capture.specialise import at_example
from weft.commands.console import fitted, wide_console
from weft.commands.simulate import seconds_text
from weft.compile.model_file import Subject, load_model_file
from weft.compile.subject import capture_subject, make_plan
from weft.cost.cluster.names import cluster_of
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ops.coverage import NONE, Coverage, Kind, coverage, show_share, unruled_warnings
from weft.plan.divided import Divided, Rest, divided
from weft.plan.follow import resolve
from weft.plan.plan import Plan
from weft.plan.plan_file import SUFFIXES
from weft.plan.recipes.text import parse_recipe
from weft.simulate.op_cost import OpCosts, kept_bytes
from weft.simulate.timing import clocks_of
from weft.train.memory.amounts import shown as amount

HEADS = ("operator", "count", "flops", "bytes", "rule", "from", "means")
NOTHING = Divided(devices=1, flops_share=0.0, bytes_share=0.0, rest=())
LONGEST = 5
"""Kinds of operators whose times are shown."""
MAX_REST = 8
"""So many rows of what is not divided are shown to people."""


@dataclass(frozen=True)
class Under:
    """What a plan divides: nothing if there is no such plan, and why."""

    plan: str
    found: Divided
    reason: str = ""
    made: Plan | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "plan": self.plan,
            "flops_share": self.found.flops_share,
            "bytes_share": self.found.bytes_share,
            "rest": [one.as_json() for one in self.found.rest],
            **({"error": self.reason} if self.reason else {}),
        }


def run(options: argparse.Namespace) -> int:
    """The command."""
    # what the user's code prints is not what was asked for
    with redirect_stdout(sys.stderr), Console(stderr=True).status("loading the model") as status:
        subject = load_model_file(options.file, hollow=0)
        status.update("capturing the model")
        graph = capture_subject(subject)
        status.update("looking up rules")
        found = coverage(graph)
        status.update("planning")
        under = divide(options.plan, at_example(graph), subject)
        status.update("looking at each operator")
        taken = None if options.cluster is None or under.made is None else taken_by(under.made, options.cluster)
    if options.json:
        times = {} if taken is None else {"times": taken.as_json()}
        print(json.dumps({**as_json(found, under, options.file), **times}))
    else:
        show(found, under, options.file)
        if taken is not None:
            show_times(taken, under.plan)
    return 0


@dataclass(frozen=True)
class Taken:
    """Seconds that operators take by themselves on one device of each, forward and backward.

    Args:
        source: where times are from. kept: bytes that backward needs of forward.
    """

    device: str
    forward: float
    backward: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    kept: int = 0
    source: str = ""

    def as_json(self) -> dict[str, object]:
        return {**vars(self), "kinds": dict(self.kinds)}


def taken_by(plan: Plan, name: str) -> Taken:
    """What the operators of a plan take on a cluster."""
    cluster = cluster_of(name)
    cluster.refuse(plan.devices)
    clocks, device = clocks_of(cluster, plan.devices), cluster.device(0)
    layouts, costs = resolve(plan, plan.rules), OpCosts(plan.graph, plan.rules)
    kinds: dict[str, float] = {}
    forward = backward = 0.0
    for op in plan.graph.ops:
        first, second = costs.of(op, layouts[op.name]).seconds(clocks.times[device.name].seconds)
        forward, backward = forward + first, backward + second
        kinds[op.kind] = kinds.get(op.kind, 0.0) + first + second
    kept = kept_bytes(plan.graph, layouts, costs)
    longest = dict(sorted(kinds.items(), key=lambda one: -one[1]))
    return Taken(device.name, forward, backward, longest, kept, clocks.source)


def show_times(taken: Taken, plan: str) -> None:
    """The longest kinds, for people."""
    console, total = wide_console(), taken.forward + taken.backward
    most = ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in list(taken.kinds.items())[:LONGEST] if total)
    console.print(
        f"on {taken.device} under {plan}: operators by themselves take {seconds_text(taken.forward)} forward and "
        f"{seconds_text(taken.backward)} backward ({most}); {amount(taken.kept)} are kept for backward",
        soft_wrap=True,
    )
    console.print(f"times: {taken.source}; weft simulate tells what a step takes", soft_wrap=True)


def divide(plan: str, graph: Graph, subject: Subject) -> Under:
    """What the plan divides of a model."""
    is_recipe = not (plan.endswith(SUFFIXES) or ".py" in plan)
    if is_recipe:
        parse_recipe(plan)
    try:
        made = make_plan(plan, graph, subject, None)
        return Under(plan, divided(made), made=made)
    except PlanError as error:
        # of a recipe what is misspelt is an error; what finds nothing to cut is an answer
        if not is_recipe:
            raise
        return Under(plan, NOTHING, error.message)


def as_json(found: Coverage, under: Under, file: str) -> dict[str, object]:
    """All that there is to show, as plain values."""
    return {
        "file": str(file),
        "operators": found.operators,
        "with_rule": found.ruled,
        "flops_share": found.flops_share,
        "bytes_share": found.bytes_share,
        "kinds": [kind.as_json() for kind in found.kinds],
        "cut": under.as_json(),
        "warnings": unruled_warnings(found.kinds),
    }


def show(found: Coverage, under: Under, title: str) -> None:
    """The table, for people."""
    console = wide_console()
    console.print(f"{title}: {found.operators} operators of {len(found.kinds)} kinds", soft_wrap=True)
    rows, styles = [_cells(kind) for kind in found.kinds], ["yellow" * (kind.source == NONE) for kind in found.kinds]
    console.print(fitted(console, HEADS, rows, right=HEADS[1:4], optional=("means", "from"), styles=styles))
    console.print(
        "name+: cutting it leaves addends. name!: cut by an algorithm whose parts talk. name^: nobody may cut it.\n"
        "flops, bytes: share of the floating-point work and of the memory traffic of one forward.",
        soft_wrap=True,
    )
    console.print(str(found), soft_wrap=True, style="green" if found.ruled == found.operators else "")
    for text in unruled_warnings(found.kinds):
        console.print(f"warning: {text}", soft_wrap=True, style="yellow")
    for text in _divided_lines(under):
        console.print(text, soft_wrap=True)


def _divided_lines(under: Under) -> list[str]:
    """One line of shares, then what is left over, repeated layers in one row."""
    if under.reason:
        return [f"under {under.plan}: no such plan: {under.reason}"]
    if under.found.devices == 1:
        return [f"under {under.plan}: one device does all of the work"]
    shares = f"{show_share(under.found.flops_share)} of the floating-point work"
    lines = [f"under {under.plan}: {shares} is cut, {show_share(under.found.bytes_share)} of the memory traffic"]
    rest = [one for one in under.found.folded if one.flops_share]
    lines += [f"  not cut: {_told(one)}" for one in rest[:MAX_REST]]
    if hidden := rest[MAX_REST:]:
        share = show_share(sum(one.flops_share for one in hidden))
        lines.append(f"  not cut: {share} in {sum(one.count for one in hidden)} more operators")
    return lines


def _told(one: Rest) -> str:
    times = f" ({one.count} times)" if one.count > 1 else ""
    return f"{show_share(one.flops_share)} {one.op}{times}{f', {one.line}' if one.line else ''}: {one.why}"


def _cells(kind: Kind) -> tuple[str, ...]:
    others = len(kind.rules) - 1
    more = f"  (+{others} form{'s' * (others > 1)})" if others else ""
    return (
        kind.operator,
        str(kind.count),
        show_share(kind.flops_share),
        show_share(kind.bytes_share),
        "" if kind.source == NONE else kind.rules[0] + more,
        kind.source,
        kind.means,
    )
