"""`weft explain FILE --plan P [--cluster C]`: what determines how long a step takes, and what would change it.

In: the options. Out: what is on the critical path, by line of the model, with its share of the step; what waits for
what; and the same step with parts of the machine that are twice as fast, or with more memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout

from rich.console import Console

from weft.commands.console import fitted, wide_console
from weft.commands.simulate import forecast, seconds_text
from weft.compile.model_file import load_model_file
from weft.compile.subject import in_precision
from weft.cost.cluster.names import cluster_of
from weft.simulate.engine import what_if
from weft.simulate.foresee import Forecast, room
from weft.simulate.machine import CHANGES
from weft.simulate.result import Simulation
from weft.train.memory.amounts import shown

MOST = 8
"""Lines of the critical path that are shown."""


def run(options: argparse.Namespace) -> int:
    """The command."""
    with redirect_stdout(sys.stderr), Console(stderr=True).status("loading the model") as status:
        subject = in_precision(load_model_file(options.file, hollow=0), options.precision)
        cluster = cluster_of(options.cluster)
        one = forecast(options.plan, subject, cluster, options, status.update)
        changed = {name: what_if(one.job, one.machine, change) for name, change in CHANGES.items()}
    if options.json:
        path = [{"what": what, "seconds": seconds} for what, seconds in one.simulation.critical_path()]
        others = {name: found.seconds for name, found in changed.items()}
        print(json.dumps({"plan": one.plan, "seconds": one.simulation.seconds, "path": path, "what_if": others}))
        return 0
    show(one, changed, f"{options.file} under {one.plan} on {cluster.name}")
    return 0


def show(one: Forecast, changed: dict[str, Simulation], title: str) -> None:
    """In words and per cent."""
    console, found = wide_console(), one.simulation
    console.print(f"{title}: {seconds_text(found.seconds)} a step", soft_wrap=True)
    console.print(sentence(found), soft_wrap=True)
    path = found.critical_path()
    rows = [(what, seconds_text(seconds), f"{seconds / found.seconds:.1%}") for what, seconds in path[:MOST]]
    rest = sum(seconds for _, seconds in path[MOST:])
    if rest:
        rows.append((f"{len(path) - MOST} more", seconds_text(rest), f"{rest / found.seconds:.1%}"))
    console.print(fitted(console, ("on the critical path", "time", "share"), rows, right=("time", "share")))
    rows = [
        (name, seconds_text(other.seconds), _change(other.seconds / found.seconds - 1))
        for name, other in sorted(changed.items(), key=lambda each: each[1].seconds)
    ]
    console.print(fitted(console, ("with", "a step takes", "change"), rows, right=("a step takes", "change")))
    fullest = one.fullest
    there = room(one.machine.device(fullest.rank))
    if one.over:
        console.print(one.shortage(), soft_wrap=True)
    else:
        console.print(
            f"memory: rank {fullest.rank} holds {shown(fullest.memory.peak)} of {shown(there)}; "
            "more would not make the step faster"
        )
    console.print(f"times: {one.source}", soft_wrap=True)


def _change(share: float) -> str:
    return f"{share:+.1%}" if abs(share) >= 0.0005 else "none"


def sentence(found: Simulation) -> str:
    """What dominates the step."""
    total = found.seconds * found.devices
    busy = sum(one.alike * one.busy for one in found.ranks) / total if total else 0.0
    parts = {
        "computing": busy,
        "communication that nothing overlaps": found.exposed,
        "waiting for other stages": found.bubble,
        "waiting for the host, which issues operators": found.host,
    }
    most, *others = sorted(parts.items(), key=lambda one: -one[1])
    rest = ", ".join(f"{share:.0%} {name}" for name, share in others if share >= 0.005)
    return f"{most[1]:.0%} of the devices' time is {most[0]}{f'; {rest}' if rest else ''}."
