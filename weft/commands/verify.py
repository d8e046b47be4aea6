"""`weft verify FILE`: a plan, or a program as it lies in a directory, against one device.

In: the options. Out: the verdict as text for people, with `--json` one JSON object as the last line, and the exit code:
0 if equal, 1 if not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from weft.commands.console import plain_console, table, user_output
from weft.errors import WeftError
from weft.verify import Result, verify, verify_program
from weft.verify.compare import Processes, shortened, show

OK, DIFFERENT = 0, 1
SHARED = ("devices", "seed", "processes", "device", "backend", "timeout", "precision")
"""Options of both ways to verify."""
MAX_LINES = 6
"""Of operators that run whole."""
MAX_KINDS = 5
"""Of operators that an axis cuts."""
MAX_ROW = 100
"""Characters of a device's events."""


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.program is not None and options.links is not None:
        raise WeftError("--links says how to make a program, and --program DIR is made", remedy="leave out --links")
    shared = {name: getattr(options, name) for name in SHARED}
    with user_output(options), Console(stderr=True).status("starting") as status:
        if options.program is None:
            result = verify(options.file, plan=options.plan, links=options.links, say=status.update, **shared)
        else:
            tell = plain_console().print
            result = verify_program(options.file, program=options.program, say=status.update, tell=tell, **shared)
    under = options.plan if options.program is None else f"the program in {options.program}"
    show_result(result, title=f"{options.file} under {under}", all=options.all)
    if options.json:
        print(json.dumps(result.as_json(), allow_nan=False))
    return OK if result.equal else DIFFERENT


def show_result(result: Result, *, title: str, all: bool = False) -> None:
    """Print a verdict for people; long lists are cut short unless all of them is asked for."""
    console = plain_console()
    console.print(title)
    summary = result.summary
    axes = summary.get("axes", {})
    console.print(f"{summary.get('operators', 0)} operators on {result.devices} devices")
    for name, axis in axes.items():
        kinds = _some([f"{count} {kind}" for kind, count in axis["kinds"].items()], None if all else MAX_KINDS)
        console.print(f"  {name}={axis['size']} cuts {axis['cut']} of them: {kinds or 'none'}")
    if "pieces" in summary:
        _show_pieces(console, result, all=all)
    else:
        _show_whole(console, result, None if all else MAX_LINES)
    if proven := summary.get("proven"):
        console.print(f"proven before running: {proven}")
    rows = [(found.kind, show(found.value), found.tensor) for found in result.differences]
    console.print(table(("compared", "largest difference", "in"), rows))
    for one in result.sizes:
        console.print(f"the same program {one}")
    if result.silenced:
        some = "1 element" if result.silenced == 1 else f"{result.silenced} elements"
        console.print(f"taken as zero in the updates: {some} of gradients that are rounding only")
    if result.rounded is not None:
        console.print(str(result.rounded))
    elif result.rounding:
        rounding = ", ".join(f"{found.kind} {show(found.value, 0)}" for found in result.rounding)
        console.print(f"rounding in the model's own precision, not judged: {rounding}")
    if result.processes is not None:
        console.print(_compared_with_emulator(result.processes))
    _show_verdict(console, result)


def _some(words: Sequence[str], most: int | None) -> str:
    """Words, the first few of many.

    >>> _some(["3 linear", "1 add", "1 gelu"], 2), _some(["3 linear", "1 add"], None)
    ('3 linear, 1 add and 1 more kind', '3 linear, 1 add')
    """
    hidden = 0 if most is None else max(0, len(words) - most)
    more = f" and {hidden} more kind{'s' * (hidden > 1)}" if hidden else ""
    return ", ".join(words[:most]) + more


def _show_pieces(console: Console, result: Result, *, all: bool) -> None:
    """Stages, micro-batches, the order of events."""
    summary = result.summary
    pieces, parts = summary["pieces"], summary["microbatches"]
    for piece in pieces:
        where = ", ".join(map(str, piece["devices"]))
        console.print(f"  {piece['name']} on device{'s' * (len(piece['devices']) > 1)} {where}")
    alone = f"{len(pieces)} piece{'s' * (len(pieces) > 1)}"
    console.print(
        f"{alone}, {parts} micro-batch{'es' * (parts > 1)} a step, {idle_words(summary)}; the order:",
    )
    for device, text in summary["schedule"].items():
        console.print(f"  {device}: {text if all else _shortened(text)}")
    for text in summary.get("warnings", ()):
        console.print(f"warning: {text}", style="yellow")


def idle_words(found: Mapping[str, Any]) -> str:
    """The idle share, by unit times and by estimated ones."""
    return f"idle {found['idle']:.1%} if pieces take equally long, {found['idle_estimated']:.1%} by estimated times"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ROW else text[: text.rindex(" ", 0, MAX_ROW)] + " ..."


def _show_whole(console: Console, result: Result, most: int | None) -> None:
    """Name what no axis cuts."""
    if result.devices == 1:
        return
    axes, whole = result.summary.get("axes"), result.summary.get("whole", [])
    if axes is not None and not any(axis["cut"] for axis in axes.values()):
        console.print(
            f"warning: this plan cuts nothing: all {result.devices} devices do the same work",
            style="yellow",
        )
    for text in result.summary.get("warnings", ()):
        console.print(f"warning: {text}", style="yellow")
    told = {text.split(" ")[0] for text in result.summary.get("warnings", ())}
    whole = [group for group in whole if not (group["reason"] and group["kind"] in told)]
    lines = [_describe(group) for group in whole if group["heavy"] or group["reason"]]
    if light := [_describe(group) for group in whole if not (group["heavy"] or group["reason"])]:
        lines.append(_some(light, most))
    if len(lines) == 1:
        console.print(f"runs whole on every device: {lines[0]}")
    elif lines:
        console.print("runs whole on every device:")
        hidden = 0 if most is None else len(lines) - most
        lines = [*lines[: -hidden - 1], f"and {hidden + 1} more kinds"] if hidden > 0 else lines
        for line in lines:
            console.print(f"  {line}")


def _describe(group: Mapping[str, Any]) -> str:
    """`2 linear (out_proj/linear; model.py:7)`, and why, if there is a reason."""
    text = f"{group['count']} {group['kind']}"
    if not (group["heavy"] or group["reason"]):
        return text
    return f"{text} ({'; '.join(str(group[key]) for key in ('first', 'source', 'reason') if group[key])})"


def _compared_with_emulator(found: Processes) -> str:
    text = f"on {found.backend} processes: "
    if found.equal_bits:
        return text + "equal to the emulator bit for bit"
    return text + f"{show(found.difference)} from the emulator in {found.tensor} ({found.why})"


def _show_verdict(console: Console, result: Result) -> None:
    if result.equal:
        console.print(f"equal to one device (every difference below {result.tolerance:.0e})", style="green")
        return
    console.print(f"different from one device: {show(result.largest_difference)}", style="red")
    for text in shortened(result.disagreements):
        console.print(f"  copies differ: {text}")
    first = result.first_difference
    if first is not None:
        console.print(f"  first difference: {show(first.difference)} in {first.tensor}")
        for head, text in (("operator: ", first.op), ("at: ", first.source), ("", first.note), ("try: ", first.remedy)):
            if text:
                console.print(f"  {head}{text}")
