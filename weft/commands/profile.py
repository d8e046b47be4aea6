"""`weft profile`: what communication costs between processes of this machine, and how long a model's operators take.

In: the options. Out: without a model the table of costs in a file, its gist as text. With a model and a plan, in the
user's profile: the operators of the plan's step that nobody has measured yet, and what communication costs between as
many processes, for `weft simulate`.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from weft.commands.console import check_writable, plain_console, table
from weft.compile import compile_subject
from weft.compile.model_file import load_model_file
from weft.compile.subject import in_precision
from weft.cost.cluster.detect import cpu_cluster
from weft.cost.measure import measure_links
from weft.errors import WeftError
from weft.simulate.timing import clocks_of, measure_here

MOST = 5
"""Operators that could not be measured and are named."""


def run(options: argparse.Namespace) -> int:
    """The command."""
    if (options.file is None) != (options.plan is None):
        raise WeftError("a model is profiled under a plan", remedy="weft profile FILE --plan P")
    if options.file is None:
        return _links(options)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("loading the model", total=None)
        with redirect_stdout(sys.stderr):
            subject = in_precision(load_model_file(options.file, hollow=0), options.precision)
            compiled = compile_subject(subject, options.plan, say=lambda text: progress.update(bar, description=text))
        cluster = cpu_cluster(compiled.devices)
        path = None if options.profile is None else Path(options.profile)
        refused = measure_here(
            compiled,
            subject,
            cluster,
            path,
            lambda what, count, total: progress.update(
                bar, description=f"measuring {what}", completed=count, total=total
            ),
        )
    source = clocks_of(cluster, compiled.devices, path).source
    if options.json:
        print(json.dumps({"profile": source, "refused": dict(refused)}))
        return 0
    console = plain_console()
    console.print(f"{options.file} under {options.plan}: {source}")
    for key, reason in list(refused.items())[:MOST]:
        console.print(f"not measured, and estimated: {json.loads(key)[0]}: {reason}")
    if len(refused) > MOST:
        console.print(f"and {len(refused) - MOST} more")
    return 0


def _links(options: argparse.Namespace) -> int:
    check_writable(options.output, "--output")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"timing collectives between {options.processes} processes", total=None)
        links = measure_links(
            options.backend,
            processes=options.processes,
            done=lambda count, total: progress.update(bar, completed=count, total=total),
        )
        links.save(options.output)
    rows = [(kind, f"{links.seconds(kind, options.processes, 16 << 20):.4f}") for kind in links.curves]
    console = plain_console()
    console.print(table(("collective", "seconds for 16 MiB"), rows))
    console.print(f"written to {options.output}")
    if options.json:
        print(json.dumps(json.loads(links.to_json())))
    return 0
