"""`weft profile -o links.json`: what communication costs between processes of this machine.

In: the options. Out: the table of costs in a file, its gist as text.
"""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.progress import Progress

from weft.commands.console import plain_console, table
from weft.cost.measure import measure_links


def run(options: argparse.Namespace) -> int:
    """The command."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"timing collectives between {options.processes} processes", total=None)
        links = measure_links(
            options.backend,
            processes=options.processes,
            done=lambda count, total: progress.update(bar, completed=count, total=total),
        )
        links.save(options.output)
    rows = [(kind, f"{links.seconds(kind, options.processes, 16 << 20):.4f}") for kind in links.rates]
    console = plain_console()
    console.print(table(("collective", "seconds for 16 MiB"), rows))
    console.print(f"written to {options.output}")
    if options.json:
        print(json.dumps(json.loads(links.to_json())))
    return 0
