"""`weft simulate FILE --plan P [--cluster C]`: how long a step takes and what it needs, before anything runs.

In: the options; several plans, separated by `;`. Out: for one plan what the step's time goes into and what each kind of
rank holds; for several a table, the fastest that fits first, and below it what could not be simulated. With `--largest`
the largest batch, or the longest sequence, that fits. Nothing is run: what is said of another machine is what its data
sheets, or its profile, give.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.commands.console import check_writable, fitted, plain_console, wide_console
from weft.compile import compile_subject
from weft.compile.model_file import Subject, load_model_file
from weft.compile.subject import in_precision
from weft.cost.cluster.cluster import Cluster
from weft.cost.cluster.names import cluster_of
from weft.errors import PlanError, WeftError
from weft.simulate.foresee import Forecast, foresee, room
from weft.simulate.largest import MOST, Largest, largest
from weft.simulate.timing import clocks_of, measure_here
from weft.train.memory.amounts import shown

Say = Callable[[str], None]
FAILED = 2
"""Exit code if none of several plans could be simulated."""


def run(options: argparse.Namespace) -> int:
    """The command."""
    plans = [one.strip() for one in options.plan.split(";") if one.strip()]
    if not plans:
        raise PlanError("no plan is given", place="--plan", remedy='--plan dp=2, or several: --plan "dp=2;tp=2"')
    if options.largest and len(plans) > 1:
        raise WeftError("--largest looks at one plan", remedy="give one --plan")
    if options.timeline is not None:
        if options.largest:
            raise WeftError("--largest simulates no step, so it has no time line", remedy="leave out --timeline")
        check_writable(options.timeline, "--timeline")
    with redirect_stdout(sys.stderr), Console(stderr=True).status("loading the model") as status:
        subject = in_precision(load_model_file(options.file, hollow=0), options.precision)
        cluster = cluster_of(options.cluster)
        if options.largest:
            found = largest(options.largest, subject, plans[0], cluster, options.devices, status.update)
            forecasts: list[Forecast | WeftError] = []
        else:
            forecasts = [_forecast(one, subject, cluster, options, status.update) for one in plans]
    if options.largest:
        return _tell_largest(found, plans[0], cluster, options)
    if len(plans) == 1 and isinstance(forecasts[0], WeftError):
        raise forecasts[0]
    title = f"{options.file} on {cluster.name}"
    if options.json:
        rows = [_as_json(name, one) for name, one in zip(plans, forecasts, strict=True)]
        print(json.dumps({"file": str(options.file), "cluster": cluster.name, "plans": rows}))
    elif len(plans) > 1:
        show_ranking(plans, forecasts, title)
    else:
        (one,) = forecasts
        assert isinstance(one, Forecast)
        show_one(one, title)
    if options.timeline is not None:
        _write_timeline(Path(options.timeline), forecasts)
    return 0 if any(isinstance(one, Forecast) for one in forecasts) else FAILED


def _forecast(
    plan: str, subject: Subject, cluster: Cluster, options: argparse.Namespace, say: Say
) -> Forecast | WeftError:
    """What one plan takes, or why it cannot be said."""
    try:
        return forecast(plan, subject, cluster, options, say)
    except WeftError as error:
        return error


def forecast(plan: str, subject: Subject, cluster: Cluster, options: argparse.Namespace, say: Say) -> Forecast:
    """What one plan takes; what is missing is measured before, if that is asked for."""
    compiled = compile_subject(subject, plan, options.devices, say=lambda text: say(f"{plan}: {text}"))
    cluster.refuse(compiled.devices)
    path = None if options.profile is None else Path(options.profile)
    if (path is not None or options.measure) and cluster.device(0).kind != "cpu":
        name = "--measure" if options.measure else "--profile"
        raise WeftError(f"{name} is about this machine, and {cluster.name} is another one", remedy=f"leave out {name}")
    if path is not None and not options.measure and not path.is_file():
        raise WeftError(
            f"there is no profile {path}",
            place="--profile",
            remedy="add --measure, or: weft profile FILE --plan P --profile FILE",
        )
    if options.measure:

        def done(what: str, count: int, total: int) -> None:
            say(f"{plan}: measuring {what}, {count} of {total}")

        measure_here(compiled, subject, cluster, path, done)
    say(f"{plan}: simulating")
    return foresee(compiled, subject, cluster, clocks_of(cluster, compiled.devices, path), name=plan)


def show_one(one: Forecast, title: str) -> None:
    """What a step takes and goes into."""
    console, found = wide_console(), one.simulation
    console.print(f"{title} under {one.plan}: {seconds_text(found.seconds)} a step", soft_wrap=True)
    rate = "" if found.mfu is None else f", {found.mfu:.1%} of what the devices could do (MFU)"
    console.print(f"{found.tokens_per_second:,.0f} tokens/s{rate}")
    heads = ("rank", "alike", "computes", "communicates", "waits for stages", "host", "memory", "of it")
    rows = []
    for rank in found.ranks:
        shares = [f"{part / found.seconds:.1%}" for part in (rank.busy, rank.exposed, rank.bubble, rank.host)]
        most = ", ".join(f"{kind} {shown(size)}" for kind, size in list(rank.memory.kinds.items())[:3])
        rows.append((str(rank.rank), str(rank.alike), *shares, shown(rank.memory.peak), most))
    console.print(fitted(console, heads, rows, right=heads[1:7], optional=("of it", "host", "alike")))
    _tell_of_memory(console, one)
    console.print(f"times: {one.source}", soft_wrap=True)


def _tell_of_memory(console: Console, one: Forecast) -> None:
    rank = one.fullest
    there = room(one.machine.device(rank.rank))
    if one.over:
        console.print(one.shortage(), style="red", soft_wrap=True)
    else:
        console.print(f"the fullest rank holds {shown(rank.memory.peak)} of {shown(there)}")


def show_ranking(plans: Sequence[str], forecasts: Sequence[Forecast | WeftError], title: str) -> None:
    """Plans by time, those that do not fit or do not work behind."""
    console = wide_console()
    console.print(title)
    heads = ("plan", "devices", "step", "tokens/s", "MFU", "communicates", "waits for stages", "memory", "")
    good = sorted((one for one in forecasts if isinstance(one, Forecast)), key=_rank)
    optional = ("MFU", "tokens/s", "waits for stages", "communicates", "devices")
    if good:
        console.print(fitted(console, heads, list(map(_row, good)), right=heads[1:-1], optional=optional))
    for name, one in zip(plans, forecasts, strict=True):
        if isinstance(one, WeftError):
            remedy = f" (try: {one.remedy})" if one.remedy else ""
            console.print(f"{name}: {one.message}{remedy}", soft_wrap=True)
    sources: dict[str, list[str]] = {}
    for each in good:
        sources.setdefault(each.source, []).append(each.plan)
    for source, names in sources.items():
        of_some = f" of {'; '.join(names)}" if len(sources) > 1 else ""
        console.print(f"times{of_some}: {source}", soft_wrap=True)


def _rank(one: Forecast) -> tuple[bool, float]:
    return one.over > 0, one.simulation.seconds


def _row(one: Forecast) -> tuple[str, ...]:
    found = one.simulation
    return (
        one.plan,
        str(found.devices),
        seconds_text(found.seconds),
        f"{found.tokens_per_second:,.0f}",
        "" if found.mfu is None else f"{found.mfu:.1%}",
        f"{found.exposed:.1%}",
        f"{found.bubble:.1%}",
        shown(found.memory),
        f"{shown(one.over)} too much" if one.over else "fits",
    )


def seconds_text(seconds: float) -> str:
    """`12.3 ms`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _as_json(plan: str, one: Forecast | WeftError) -> dict[str, Any]:
    if isinstance(one, WeftError):
        return {"plan": plan, "error": one.message, "remedy": one.remedy}
    found = {"plan": plan, "fits": not one.over, "over": one.over, "source": one.source}
    return {**found, **json.loads(one.simulation.to_json())}


def _tell_largest(found: Largest, plan: str, cluster: Cluster, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps({"plan": plan, "cluster": cluster.name, **vars(found)}))
        return 0
    console = plain_console()
    console.print(
        f"the largest {found.what} of {options.file} under {plan} on {cluster.name}: {found.size:,} (the example has "
        f"{found.example:,}); the fullest rank then holds {shown(found.memory)}"
    )
    if found.next is None:
        console.print(f"more than {MOST:,} times the example was not tried")
    else:
        console.print(f"{found.next:,} does not fit{f': {found.why}' if found.why else ''}")
    return 0


def _write_timeline(path: Path, forecasts: Sequence[Forecast | WeftError]) -> None:
    events = [event for one in forecasts if isinstance(one, Forecast) for event in one.simulation.chrome_trace()]
    path.write_text(json.dumps({"traceEvents": events}))
    plain_console(stderr=True).print(f"written to {path}: open it in Perfetto or chrome://tracing")
