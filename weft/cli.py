"""The `weft` command.

In: the command line. Out: text for people on stdout, progress on stderr, with `--json` one JSON object as the last line
of stdout, and an exit code: 0 if all is well, 1 if verification finds a difference, 2 on any error. Errors are told in
three lines (what, where, what to do); `--debug` shows the stack trace. torch is loaded when a command runs, not before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.verify import Result
    from weft.verify.compare import Processes

OK, DIFFERENT, FAILED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    if options.debug:
        return command(options)
    with _Told() as told:
        told.code = command(options)
    return told.code


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
    with console.status("starting") as status:
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


def run_profile(options: argparse.Namespace) -> int:
    """`weft profile -o links.json`."""
    with Console(stderr=True).status(f"timing collectives between {options.processes} processes"):
        from weft.cost.measure import measure_links

        links = measure_links(options.backend, processes=options.processes)
        links.save(options.output)
    table = Table("collective", "seconds for 16 MiB", box=None, pad_edge=False)
    for kind in links.rates:
        table.add_row(kind, f"{links.seconds(kind, options.processes, 16 << 20):.4f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
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
    if proven := summary.get("proven"):
        console.print(f"proven before running: {proven}", markup=False)
    console.print(_table(result))
    if result.rounding:
        rounding = ", ".join(f"{found.kind} {found.value:.0e}" for found in result.rounding)
        console.print(f"rounding in the model's own precision, not judged: {rounding}", markup=False)
    if result.processes is not None:
        console.print(_compared_with_emulator(result.processes), markup=False)
    _show_verdict(console, result)


def _compared_with_emulator(found: Processes) -> str:
    text = f"on {found.backend} processes: "
    if found.equal_bits:
        return text + "equal to the emulator bit for bit"
    return text + f"{found.difference:.1e} from the emulator in {found.tensor} ({found.why})"


def _table(result: Result) -> Table:
    table = Table("compared", "largest difference", "in", box=None, pad_edge=False)
    for found in result.differences:
        table.add_row(found.kind, f"{found.value:.1e}", found.tensor)
    return table


def _show_verdict(console: Console, result: Result) -> None:
    if result.equal:
        console.print(f"equal to one device (every difference below {result.tolerance:.0e})", style="green")
        return
    console.print(f"different from one device: {result.largest_difference:.1e}", style="red")
    for text in result.disagreements:
        console.print(f"  copies differ: {text}", markup=False)
    first = result.first_difference
    if first is not None:
        console.print(f"  first difference: {first.difference:.1e} in {first.tensor}", markup=False)
        if first.op:
            console.print(f"  operator: {first.op}", markup=False)
        if first.source:
            console.print(f"  at: {first.source}", markup=False)
        if first.note:
            console.print(f"  {first.note}", markup=False)


@dataclass
class _Told:
    """Tells errors to the user instead of letting a stack trace out."""

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
            return True
        if isinstance(error, Exception):
            self.console.print(f"error: {type(error).__name__}: {error}", markup=False, style="red")
            self.console.print("  this is a fault in Weft: please report it with the trace that --debug shows")
            return True
        return False


if __name__ == "__main__":
    sys.exit(main())
