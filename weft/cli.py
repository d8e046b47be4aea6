"""The `weft` command.

In: the command line. Out: text for people on stdout, progress on stderr, with `--json` one JSON object as the last line
of stdout (an error too: error, at, try), and an exit code: 0 if all is well, 1 if verification finds a difference, 2 on
any error, 130 after Ctrl-C. Errors are told in three lines (what, where, what to do); `--debug` shows the stack trace.
torch is loaded when a command runs, not before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.verify import Result
    from weft.verify.compare import Processes

OK, DIFFERENT, FAILED, INTERRUPTED = 0, 1, 2, 130
MAX_LINES = 6
"""Of operators that run whole."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    with _Usage(sys.argv[1:] if argv is None else argv):
        options = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    if options.debug:
        return command(options)
    with _Told(json=options.json) as told:
        told.code = command(options)
    if told.code == INTERRUPTED:
        _leave()
    return told.code


def _leave() -> None:
    """Leave at once if a rank is still inside an operator: Python cannot end its thread, and might crash over it."""
    if any(thread.daemon and thread.name.startswith("rank ") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft", description="Draws one single-device PyTorch model across many devices, to the same numbers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="is a plan equal to one device?",
        description="Compare loss, every gradient and the weights after two optimizer steps, on emulated devices, "
        "with the eager model, in float64. Exit code 0 if equal, 1 if not, 2 on errors.",
    )
    verify.set_defaults(command=run_verify)
    verify.add_argument("file", metavar="FILE", help="a Python file with model() and example()")
    verify.add_argument(
        "--plan", required=True, metavar="P", help="a recipe (dp=2,tp=2), a plan file, or path.py:function"
    )
    verify.add_argument("--devices", type=_positive, metavar="N", help="as many as the plan needs if not given")
    verify.add_argument("--processes", action="store_true", help="on true processes instead of emulated devices")
    verify.add_argument("--links", metavar="FILE", help="what communication costs, as written by weft profile")
    verify.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    profile = commands.add_parser(
        "profile",
        help="measure what communication costs here",
        description="Start processes on this machine, time every kind of collective, and write the table of costs.",
    )
    profile.set_defaults(command=run_profile)
    profile.add_argument("--backend", default="gloo", help="of torch.distributed (default gloo)")
    profile.add_argument("--processes", type=_positive, default=2, metavar="N", help="how many to start (default 2)")
    profile.add_argument("-o", "--output", default="links.json", metavar="FILE", help="default links.json")
    train = commands.add_parser(
        "train",
        help="train on processes of this machine",
        description="Compile the model for the plan, start processes and train on data(), or on example() again and "
        "again. Exit code 0 if all went well, 2 on errors, 130 after Ctrl-C.",
    )
    train.set_defaults(command=run_train)
    train.add_argument("file", metavar="FILE", help="a Python file with model() and example()")
    train.add_argument(
        "--plan", required=True, metavar="P", help="a recipe (dp=2,tp=2), a plan file, or path.py:function"
    )
    train.add_argument(
        "--devices", type=_positive, metavar="N", help="processes; k times as many as the plan needs train k replicas"
    )
    train.add_argument("--steps", type=_positive, default=10, metavar="K", help="optimizer steps (default 10)")
    train.add_argument("--cache", default=".weft", metavar="DIR", help="where programs are kept (default .weft)")
    train.add_argument("--lr", type=float, metavar="X", help="of AdamW, instead of the optimizer of the file")
    train.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    for command in (verify, profile, train):
        command.add_argument("--json", action="store_true", help="one JSON object as the last line")
        command.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of devices")
    return value


def run_verify(options: argparse.Namespace) -> int:
    """`weft verify FILE --plan P`."""
    console = Console(stderr=True)
    with _aside(options), console.status("starting") as status:
        # Loading torch takes seconds: the spinner should be seen by then.
        from weft.verify import verify

        result = verify(
            options.file,
            plan=options.plan,
            devices=options.devices,
            links=options.links,
            seed=options.seed,
            processes=options.processes,
            say=status.update,
        )
    show_result(result, title=f"{options.file} under {options.plan}")
    if options.json:
        print(json.dumps(result.as_json(), allow_nan=False))
    return OK if result.equal else DIFFERENT


def _aside(options: argparse.Namespace) -> AbstractContextManager[object]:
    """With --json what the user's code prints goes to stderr: the last line of stdout is ours."""
    return redirect_stdout(sys.stderr) if options.json else nullcontext()


def run_profile(options: argparse.Namespace) -> int:
    """`weft profile -o links.json`."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"timing collectives between {options.processes} processes", total=None)
        from weft.cost.measure import measure_links

        links = measure_links(
            options.backend,
            processes=options.processes,
            done=lambda count, total: progress.update(bar, completed=count, total=total),
        )
        links.save(options.output)
    rows = [(kind, f"{links.seconds(kind, options.processes, 16 << 20):.4f}") for kind in links.rates]
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(("collective", "seconds for 16 MiB"), rows), markup=False)
    console.print(f"written to {options.output}", markup=False)
    if options.json:
        print(json.dumps(json.loads(links.to_json())))
    return OK


def run_train(options: argparse.Namespace) -> int:
    """`weft train FILE --plan P`."""
    with Console(stderr=True).status("starting"):
        from weft.train.command import run
    return run(options)


def show_result(result: Result, *, title: str) -> None:
    """Print a verdict for people."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False)
    summary = result.summary
    axes = summary.get("axes", {})
    console.print(f"{summary.get('operators', 0)} operators on {result.devices} devices", markup=False)
    for name, axis in axes.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in axis["kinds"].items())
        console.print(f"  {name}={axis['size']} cuts {axis['cut']} of them: {kinds or 'none'}", markup=False)
    _show_whole(console, result)
    if proven := summary.get("proven"):
        console.print(f"proven before running: {proven}", markup=False)
    rows = [(found.kind, _number(found.value), found.tensor) for found in result.differences]
    console.print(_table(("compared", "largest difference", "in"), rows), markup=False)
    if result.silenced:
        some = "1 element" if result.silenced == 1 else f"{result.silenced} elements"
        console.print(f"taken as zero in the updates: {some} of gradients that are rounding only", markup=False)
    if result.rounding:
        rounding = ", ".join(f"{found.kind} {_number(found.value, 0)}" for found in result.rounding)
        console.print(f"rounding in the model's own precision, not judged: {rounding}", markup=False)
    if result.processes is not None:
        console.print(_compared_with_emulator(result.processes), markup=False)
    _show_verdict(console, result)


def _show_whole(console: Console, result: Result) -> None:
    """Name what no axis cuts."""
    if result.devices == 1:
        return
    axes, whole = result.summary.get("axes"), result.summary.get("whole", [])
    if axes is not None and not any(axis["cut"] for axis in axes.values()):
        console.print(
            f"warning: this plan cuts nothing: all {result.devices} devices do the same work",
            style="yellow",
            markup=False,
        )
    lines = [_describe(group) for group in whole if group["heavy"] or group["reason"]]
    if light := [_describe(group) for group in whole if not (group["heavy"] or group["reason"])]:
        some = ", ".join(light[:MAX_LINES])
        lines.append(some + (f" and {len(light) - MAX_LINES} more kinds" if len(light) > MAX_LINES else ""))
    if len(lines) == 1:
        console.print(f"runs whole on every device: {lines[0]}", markup=False)
    elif lines:
        console.print("runs whole on every device:", markup=False)
        hidden = len(lines) - MAX_LINES
        lines = [*lines[: MAX_LINES - 1], f"and {hidden + 1} more kinds"] if hidden > 0 else lines
        for line in lines:
            console.print(f"  {line}", markup=False)


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
    return text + f"{_number(found.difference)} from the emulator in {found.tensor} ({found.why})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, however wide: a tensor's name is never shortened."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )


def _number(value: float, digits: int = 1) -> str:
    from weft.verify.compare import show

    return show(value, digits)


def _show_verdict(console: Console, result: Result) -> None:
    if result.equal:
        console.print(f"equal to one device (every difference below {result.tolerance:.0e})", style="green")
        return
    console.print(f"different from one device: {_number(result.largest_difference)}", style="red")
    for text in result.disagreements:
        console.print(f"  copies differ: {text}", markup=False)
    first = result.first_difference
    if first is not None:
        console.print(f"  first difference: {_number(first.difference)} in {first.tensor}", markup=False)
        if first.op:
            console.print(f"  operator: {first.op}", markup=False)
        if first.source:
            console.print(f"  at: {first.source}", markup=False)
        if first.note:
            console.print(f"  {first.note}", markup=False)
        if first.remedy:
            console.print(f"  try: {first.remedy}", markup=False)


@dataclass
class _Told:
    """Tells errors to the user instead of letting a stack trace out."""

    json: bool = False
    code: int = FAILED
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))

    def __enter__(self) -> _Told:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, WeftError):
            self.code = error.exit_code
            self.console.print(f"error: {error}", markup=False, style="red")
            self._tell_json(error.message, error.place, error.remedy)
            return True
        if isinstance(error, Exception):
            remedy = "this is a fault in Weft: please report it with the trace that --debug shows"
            self.console.print(f"error: {type(error).__name__}: {error}", markup=False, style="red")
            self.console.print(f"  {remedy}", markup=False)
            self._tell_json(f"{type(error).__name__}: {error}", "", remedy)
            return True
        if isinstance(error, KeyboardInterrupt):
            self.code = INTERRUPTED
            self.console.print("interrupted", markup=False)
            self._tell_json("interrupted", "", "")
            return True
        return False

    def _tell_json(self, error: str, place: str, remedy: str) -> None:
        if self.json:
            print(_error_json(error, place, remedy))


def _error_json(error: str, place: str, remedy: str) -> str:
    return json.dumps({"error": error, "at": place, "try": remedy})


class _Usage:
    """A command line that is not understood is told on stderr by argparse; with --json on stdout too."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SystemExit) and error.code == FAILED and "--json" in self._argv:
            print(_error_json("the command line is not understood", f"weft {' '.join(self._argv)}", "weft --help"))


if __name__ == "__main__":
    sys.exit(main())
