"""`weft ops FILE`: what a model is made of, and what of it may be cut.

In: the options. Out: a table of operators, the heaviest first, with their rules and what these mean, and what share of
the work a plan (`--plan`, `tp=2` if not given) divides, with the rest by name; with `--json` the same as plain values.
A recipe that finds nothing to cut is told, and is no error. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from rich.console import Console

from weft.capture.specialise import at_example
from weft.commands.console import fitted, wide_console
from weft.compile.model_file import Subject, load_model_file
from weft.compile.subject import capture_subject, make_plan
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ops.coverage import NONE, Coverage, Kind, coverage, show_share, unruled_warnings
from weft.plan.divided import Divided, Rest, divided
from weft.plan.plan_file import SUFFIXES
from weft.plan.recipes.text import parse_recipe

HEADS = ("operator", "count", "flops", "bytes", "rule", "from", "means")
NOTHING = Divided(devices=1, flops_share=0.0, bytes_share=0.0, rest=())
MAX_REST = 8
"""So many rows of what is not divided are shown to people."""


@dataclass(frozen=True)
class Under:
    """What a plan divides: nothing if there is no such plan, and why."""

    plan: str
    found: Divided
    reason: str = ""

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
    if options.json:
        print(json.dumps(as_json(found, under, options.file)))
    else:
        show(found, under, options.file)
    return 0


def divide(plan: str, graph: Graph, subject: Subject) -> Under:
    """What the plan divides of a model."""
    is_recipe = not (plan.endswith(SUFFIXES) or ".py" in plan)
    if is_recipe:
        parse_recipe(plan)
    try:
        return Under(plan, divided(make_plan(plan, graph, subject, None)))
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
