"""`weft ops FILE`: what a model is made of, and what of it may be cut.

In: the options. Out: a table of operators, the heaviest first, with their rules and what these mean; with `--json` the
same as plain values. No plan is needed, and nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.ops.coverage import NONE, Coverage, Kind, coverage, show_share, unruled_warnings
from weft.verify.door import capture_subject
from weft.verify.model_file import load_model_file

HEADS = ("operator", "count", "flops", "bytes", "rule", "from", "means")
WIDE = 200


def run(options: argparse.Namespace) -> int:
    """The command."""
    # what the user's code prints is not what was asked for
    with redirect_stdout(sys.stderr), Console(stderr=True).status("loading the model") as status:
        subject = load_model_file(options.file)
        status.update("capturing the model")
        graph = capture_subject(subject)
        status.update("looking up rules")
        found = coverage(graph)
    if options.json:
        print(json.dumps(as_json(found, options.file)))
    else:
        show(found, options.file)
    return 0


def as_json(found: Coverage, file: str) -> dict[str, object]:
    """All that there is to show, as plain values."""
    return {
        "file": str(file),
        "operators": found.operators,
        "with_rule": found.ruled,
        "flops_share": found.flops_share,
        "bytes_share": found.bytes_share,
        "kinds": [kind.as_json() for kind in found.kinds],
        "warnings": unruled_warnings(found.kinds),
    }


def show(found: Coverage, title: str) -> None:
    """The table, for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # piped text is not squeezed into 80 columns
        console = Console(highlight=False, width=WIDE)
    console.print(f"{title}: {found.operators} operators of {len(found.kinds)} kinds", markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        table.add_column(
            head, no_wrap=head == HEADS[0], justify="right" if head in ("count", "flops", "bytes") else "left"
        )
    for kind in found.kinds:
        table.add_row(*map(Text, _cells(kind)), style="yellow" if kind.source == NONE else "")
    console.print(table)
    console.print(
        "name+: cutting it leaves addends. name!: cut by an algorithm whose parts talk. name^: nobody may cut it.\n"
        "flops, bytes: share of the floating-point work and of the memory traffic of one forward.",
        markup=False,
        soft_wrap=True,
    )
    console.print(str(found), markup=False, soft_wrap=True, style="green" if found.ruled == found.operators else "")
    for text in unruled_warnings(found.kinds):
        console.print(f"warning: {text}", markup=False, soft_wrap=True, style="yellow")


def _cells(kind: Kind) -> tuple[str, ...]:
    more = f"  (and {len(kind.rules) - 1} more forms)" if len(kind.rules) > 1 else ""
    return (
        kind.operator,
        str(kind.count),
        show_share(kind.flops_share),
        show_share(kind.bytes_share),
        "" if kind.source == NONE else kind.rules[0] + more.replace("1 more forms", "1 more form"),
        kind.source,
        kind.means,
    )
