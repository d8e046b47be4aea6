"""The `weft` command: what its commands share (`weft/commands/options.py` lists them).

In: the command line. Out: text for people on stdout, progress on stderr, with `--json` one JSON object as the last line
of stdout (an error too: error, at, try), and an exit code: 0 if all is well, 1 if verification finds a difference, 2 on
any error, 130 after Ctrl-C. Errors are told in three lines (what, where, what to do); `--debug` shows the stack trace.
torch is loaded when a command runs, not before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console

from weft import __version__
from weft.commands.console import plain_console
from weft.commands.options import COMMANDS
from weft.commands.usage import Parser
from weft.errors import WeftError

FAILED, INTERRUPTED = 2, 130
TOUR = """a tour, in three commands:
  weft ops examples/gpt.py
      its operators, and along which dims each may be cut
  weft verify examples/gpt.py --plan dp=2,tp=2
      is the plan equal to one device? no GPU needed
  weft train examples/gpt.py --plan dp=2 --steps 100
      train on processes of this machine

On a new machine, first: weft doctor.
In place of examples/gpt.py: a file of your own with model(), whose forward
returns the loss, and example(), a batch; or a Hugging Face model, which is not
downloaded: hf:FOLDER, hf:LlamaConfig(hidden_size=64, num_hidden_layers=2).
weft COMMAND --help has the options and examples. weft completion bash|zsh|fish
prints a script that completes commands and options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    with _Told(json="--json" in words) as told:
        options = make_parser().parse_args(words)
        told.debug = options.debug
        told.code = _run(options)
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
    parser = Parser(
        prog="weft",
        description="Runs a single-device PyTorch model on many devices, to the same numbers.",
        epilog=TOUR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.parser(commands).set_defaults(module=command.module, parser=parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    """Run a command. Its module is imported here: torch takes seconds, a spinner should be seen by then."""
    with Console(stderr=True).status("starting"):
        command: Callable[[argparse.Namespace], int] = importlib.import_module(options.module).run
    return command(options)


@dataclass
class _Told:
    """Tells errors to the user instead of letting a stack trace out."""

    json: bool = False
    debug: bool = False
    code: int = FAILED
    console: Console = field(default_factory=lambda: plain_console(stderr=True))

    def __enter__(self) -> _Told:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.debug:
            return False
        match error:
            case WeftError():
                self.code = error.exit_code
                self.console.print(f"error: {error}", style="red")
                self._tell_json(error.message, error.place, error.remedy)
            case Exception():
                what = f"{type(error).__name__}: {error}"
                remedy = "this is a fault in Weft: please report it with the trace that --debug shows"
                self.console.print(f"error: {what}", style="red")
                self.console.print(f"  {remedy}")
                self._tell_json(what, "", remedy)
            case KeyboardInterrupt():
                self.code = INTERRUPTED
                self.console.print("interrupted")
                self._tell_json("interrupted", "", "")
            case _:
                return False
        return True

    def _tell_json(self, error: str, place: str, remedy: str) -> None:
        if self.json:
            print(_error_json(error, place, remedy))


def _error_json(error: str, place: str, remedy: str) -> str:
    return json.dumps({"error": error, "at": place, "try": remedy})


if __name__ == "__main__":
    sys.exit(main())
