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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from weft.errors import WeftError

FAILED, INTERRUPTED = 2, 130
PLAN = "a recipe (dp=2,tp=2), a plan file, or path.py:function"

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


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
        prog="weft",
        description="Draws one single-device PyTorch model across many devices, to the same numbers.",
        epilog="weft COMMAND --help says more, with an example.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_verify, _add_show, _add_train, _add_profile):
        command = add(commands)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--json", action="store_true", help="one JSON object as the last line")
        command.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    return parser


def _add_verify(commands: Commands) -> argparse.ArgumentParser:
    verify = commands.add_parser(
        "verify",
        help="is a plan, or a program, equal to one device?",
        description="Compare loss, every gradient and the weights after two optimizer steps, on emulated devices,\n"
        "with the eager model, in float64. With --program the code in DIR runs as it lies there, edited or not;\n"
        "it is said which. With --processes the generated code runs on true processes.\n"
        "Exit code 0 if equal, 1 if not, 2 on errors.",
        epilog="example:\n"
        "  weft verify examples/gpt.py --plan dp=2,tp=2 --processes\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2 --out program && weft verify examples/gpt.py --program program",
    )
    verify.set_defaults(command=run_verify)
    _add_file(verify)
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", metavar="P", help=PLAN)
    what.add_argument("--program", metavar="DIR", help="a generated program, instead of a plan")
    verify.add_argument("--devices", type=_positive, metavar="N", help="as many as the plan needs if not given")
    verify.add_argument("--processes", action="store_true", help="on true processes instead of emulated devices")
    verify.add_argument("--links", metavar="FILE", help="what communication costs, as written by weft profile")
    verify.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    return verify


def _add_show(commands: Commands) -> argparse.ArgumentParser:
    show = commands.add_parser(
        "show",
        help="what a plan makes of a model: table, program, code",
        description="Without a flag: the plan by module, layers that repeat in one row, with what is cut, on which\n"
        "devices, by which collectives and how many bytes a device sends in a step.\n"
        "With --code, --program or --json stdout holds that and nothing else.",
        epilog="example:\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2 --code | less\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2 --out program",
    )
    show.set_defaults(command=run_show)
    _add_file(show)
    show.add_argument("--plan", required=True, metavar="P", help=PLAN)
    show.add_argument("--devices", type=_positive, metavar="N", help="as many as the plan needs if not given")
    show.add_argument("--links", metavar="FILE", help="what communication costs, as written by weft profile")
    what = show.add_mutually_exclusive_group()
    what.add_argument("--code", action="store_true", help="the generated program")
    what.add_argument("--program", action="store_true", help="the Program before it becomes code, one line a step")
    show.add_argument("--out", metavar="DIR", help="write the program's files there")
    show.add_argument("--force", action="store_true", help="with --out: overwrite a program that was edited")
    return show


def _add_profile(commands: Commands) -> argparse.ArgumentParser:
    profile = commands.add_parser(
        "profile",
        help="measure what communication costs here",
        description="Start processes on this machine, time every kind of collective, and write the table of costs.",
        epilog="example:\n  weft profile -o links.json && weft verify FILE --plan tp=2 --links links.json",
    )
    profile.set_defaults(command=run_profile)
    profile.add_argument("--backend", default="gloo", help="of torch.distributed (default gloo)")
    profile.add_argument("--processes", type=_positive, default=2, metavar="N", help="how many to start (default 2)")
    profile.add_argument("-o", "--output", default="links.json", metavar="FILE", help="default links.json")
    return profile


def _add_train(commands: Commands) -> argparse.ArgumentParser:
    train = commands.add_parser(
        "train",
        help="train on processes of this machine",
        description="Compile the model for the plan, start processes and train on data(), or on example() again and\n"
        "again. A program in the cache that was edited is run as it is, and that is said.\n"
        "Exit code 0 if all went well, 2 on errors, 130 after Ctrl-C.",
        epilog="example:\n  weft train examples/gpt.py --plan dp=2 --steps 100",
    )
    train.set_defaults(command=run_train)
    _add_file(train)
    train.add_argument("--plan", required=True, metavar="P", help=PLAN)
    train.add_argument(
        "--devices", type=_positive, metavar="N", help="processes; k times as many as the plan needs train k replicas"
    )
    train.add_argument("--steps", type=_positive, default=10, metavar="K", help="optimizer steps (default 10)")
    train.add_argument("--cache", default=".weft", metavar="DIR", help="where programs are kept (default .weft)")
    train.add_argument("--lr", type=float, metavar="X", help="of AdamW, instead of the optimizer of the file")
    train.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    return train


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="a Python file with model() and example()")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of devices")
    return value


def run_verify(options: argparse.Namespace) -> int:
    """`weft verify FILE --plan P | --program DIR`."""
    # Loading torch takes seconds: the spinner should be seen by then.
    with Console(stderr=True).status("starting"):
        from weft.commands.verify import run
    return run(options)


def run_show(options: argparse.Namespace) -> int:
    """`weft show FILE --plan P`."""
    with Console(stderr=True).status("starting"):
        from weft.commands.show import run
    return run(options)


def run_profile(options: argparse.Namespace) -> int:
    """`weft profile -o links.json`."""
    with Console(stderr=True).status("starting"):
        from weft.commands.profile import run
    return run(options)


def run_train(options: argparse.Namespace) -> int:
    """`weft train FILE --plan P`."""
    with Console(stderr=True).status("starting"):
        from weft.train.command import run
    return run(options)


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
