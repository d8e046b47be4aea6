"""The `weft` command.

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
from typing import TYPE_CHECKING

from rich.console import Console

from weft import __version__
from weft.errors import WeftError

FAILED, INTERRUPTED = 2, 130
PLAN = "a recipe (dp=2,tp=2), a plan file, or path.py:function"
TOUR = """a tour, in three commands:
  weft ops    examples/gpt.py                              what the model is made of, and what of it may be cut
  weft verify examples/gpt.py --plan dp=2,tp=2             is the plan equal to one device? no GPU needed
  weft train  examples/gpt.py --plan dp=2 --steps 100      train on processes of this machine

In place of examples/gpt.py: a file of your own with model(), whose forward returns the loss, and example(), a batch;
or a Hugging Face model that lies here: hf:FOLDER, hf:LlamaConfig(hidden_size=64, num_hidden_layers=2).
weft COMMAND --help says more, with examples. weft completion bash|zsh|fish completes all this in a shell."""

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
        epilog=TOUR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_ops, _add_verify, _add_show, _add_train, _add_profile, _add_completion):
        command = add(commands)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--json", action="store_true", help="one JSON object as the last line")
        command.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    return parser


def _add_ops(commands: Commands) -> argparse.ArgumentParser:
    ops = commands.add_parser(
        "ops",
        help="what a model is made of, and what of it may be cut",
        description="Each operator: how often, its share of the floating-point work and of the memory traffic, the\n"
        "rule that says how it may be cut and where that rule comes from. What has no rule runs copied on every\n"
        "device, and its share says what that costs. Below the table: the share of the work that a plan cuts, and\n"
        "the rest by name.",
        epilog="example:\n  weft ops examples/gpt.py\n  weft ops examples/gpt.py --plan dp=2,tp=2 --json",
    )
    ops.set_defaults(command=_lazily("weft.commands.ops"))
    _add_file(ops)
    ops.add_argument("--plan", default="tp=2", metavar="P", help=f"{PLAN} (default tp=2)")
    return ops


def _add_completion(commands: Commands) -> argparse.ArgumentParser:
    completion = commands.add_parser(
        "completion",
        help="a script that completes commands and options in a shell",
        description="Print a script for the shell. It knows every command and option.",
        epilog="example:\n"
        "  weft completion bash > ~/.local/share/bash-completion/completions/weft\n"
        "  weft completion zsh >> ~/.zshrc\n"
        "  weft completion fish > ~/.config/fish/completions/weft.fish",
    )
    completion.set_defaults(command=run_completion)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return completion


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", metavar="D", help="compute in bf16 or fp16, with float32 masters of the weights")


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
    verify.set_defaults(command=_lazily("weft.commands.verify"))
    _add_file(verify)
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", metavar="P", help=PLAN)
    what.add_argument("--program", metavar="DIR", help="a generated program, instead of a plan")
    verify.add_argument("--devices", type=_positive, metavar="N", help="as many as the plan needs if not given")
    verify.add_argument("--processes", action="store_true", help="on true processes instead of emulated devices")
    verify.add_argument("--links", metavar="FILE", help="what communication costs, as written by weft profile")
    _add_precision(verify)
    verify.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    return verify


def _add_show(commands: Commands) -> argparse.ArgumentParser:
    show = commands.add_parser(
        "show",
        help="what a plan makes of a model: table, program, code",
        description="Without a flag: the plan by module, layers that repeat in one row, with what is cut, on which\n"
        "devices, by which collectives and how many bytes a device sends in a step.\n"
        "A plan in stages or micro-batches is shown by stage; --schedule draws its time table.\n"
        "--memory tells the bytes of each rank by kind: what is expected, and what two steps on processes have left.\n"
        "With --code, --program or --json stdout holds that and nothing else.",
        epilog="example:\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2 --code | less\n"
        "  weft show examples/gpt.py --plan dp=2,tp=2 --out program\n"
        "  weft show examples/gpt.py --plan pp=2,microbatches=4 --schedule\n"
        "  weft show examples/gpt.py --plan dp=2,zero=3 --memory",
    )
    show.set_defaults(command=_lazily("weft.commands.show"))
    _add_file(show)
    show.add_argument("--plan", required=True, metavar="P", help=PLAN)
    show.add_argument("--devices", type=_positive, metavar="N", help="as many as the plan needs if not given")
    show.add_argument("--links", metavar="FILE", help="what communication costs, as written by weft profile")
    _add_precision(show)
    what = show.add_mutually_exclusive_group()
    what.add_argument("--code", action="store_true", help="the generated program")
    what.add_argument("--program", action="store_true", help="the Program before it becomes code, one line a step")
    what.add_argument("--schedule", action="store_true", help="the time table of a plan in stages or micro-batches")
    what.add_argument("--memory", action="store_true", help="bytes of each rank by kind, expected and measured")
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
    profile.set_defaults(command=_lazily("weft.commands.profile"))
    profile.add_argument("--backend", default="gloo", help="of torch.distributed (default gloo)")
    profile.add_argument("--processes", type=_positive, default=2, metavar="N", help="how many to start (default 2)")
    profile.add_argument("-o", "--output", default="links.json", metavar="FILE", help="default links.json")
    return profile


def _add_train(commands: Commands) -> argparse.ArgumentParser:
    train = commands.add_parser(
        "train",
        help="train on processes of this machine",
        description="Compile the model for the plan, start processes and train: on data() of the file, on a text or\n"
        "arrays (--data), or on example() again and again. A program in the cache that was edited is run as it is,\n"
        "and that is said. Exit code 0 if all went well, 2 on errors, 130 after Ctrl-C.\n\n"
        "A text becomes bytes if the model knows 256 tokens, else its sorted characters numbered from 0; `labels` get\n"
        "the same piece as the inputs, other integer inputs the piece one token further on. Arrays (.npy, .npz,\n"
        ".safetensors) are named like the forward's arguments. The last tenth is kept for --eval-every.",
        epilog="example:\n"
        "  weft train examples/gpt.py --plan dp=2 --steps 100\n"
        "  weft train examples/gpt.py --plan tp=2 --steps 100 --lr 3e-3 --schedule cosine --warmup 10 --clip 1 "
        "--save run\n"
        "  weft train examples/gpt.py --plan dp=2 --steps 200 --lr 3e-3 --resume run",
    )
    train.set_defaults(command=_lazily("weft.train.command"))
    _add_file(train)
    train.add_argument("--plan", required=True, metavar="P", help=PLAN)
    train.add_argument(
        "--devices", type=_positive, metavar="N", help="processes; k times as many as the plan needs train k replicas"
    )
    train.add_argument("--steps", type=_positive, default=10, metavar="K", help="optimizer steps in all (default 10)")
    train.add_argument("--data", metavar="FILE", help="a text, or arrays (.npy, .npz, .safetensors)")
    train.add_argument("--lr", type=float, metavar="X", help="of AdamW, instead of the optimizer of the file")
    train.add_argument(
        "--schedule", choices=("constant", "cosine", "linear"), default="constant", help="of the learning rate"
    )
    train.add_argument("--warmup", type=_natural, default=0, metavar="N", help="steps in which the rate rises")
    _add_precision(train)
    train.add_argument(
        "--init",
        choices=("exact", "counter"),
        default="exact",
        help="values as on one device, or counted (large models)",
    )
    train.add_argument("--weights", metavar="PATH", help="start from a safetensors file, folder, index or state dict")
    train.add_argument("--clip", type=float, metavar="X", help="the largest norm of all gradients together")
    train.add_argument(
        "--eval-every", type=_positive, metavar="K", help="evaluate on eval_data(), or the end of --data"
    )
    train.add_argument("--save", metavar="DIR", help="write model, optimizer and step there at the end")
    train.add_argument("--save-every", type=_positive, metavar="K", help="and every K steps")
    train.add_argument("--resume", metavar="DIR", help="go on from what --save has written, under this plan or another")
    train.add_argument("--tensorboard", metavar="DIR", help="write events there")
    train.add_argument(
        "--memory-limit", metavar="SIZE", help="refuse a plan whose ranks will hold more in tensors: 2GiB, 500MB"
    )
    train.add_argument("--cache", default=".weft", metavar="DIR", help="where programs are kept (default .weft)")
    train.add_argument("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
    return train


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="FILE", help="a Python file with model() and example(), or hf:FOLDER, hf:LlamaConfig(...)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not 0 or more")
    return value


def _lazily(module: str) -> Callable[[argparse.Namespace], int]:
    """The `run` of a module imported when it is called: torch takes seconds, a spinner should be seen by then."""

    def run(options: argparse.Namespace) -> int:
        with Console(stderr=True).status("starting"):
            command: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
        return command(options)

    return run


def run_completion(options: argparse.Namespace) -> int:
    """`weft completion SHELL`."""
    from weft.commands.completion import script

    text = script(options.shell, make_parser())
    print(json.dumps({"shell": options.shell, "script": text}) if options.json else text, end="\n" * options.json)
    return 0


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
