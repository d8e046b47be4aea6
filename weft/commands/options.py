"""The commands of `weft` and their options, as data: what `weft --help` and completion in a shell tell.

A new command is a module with `run(options) -> exit code`, and an entry of `COMMANDS`. Nothing here loads torch: the
module of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Option = Callable[[Any], object]
"""Adds itself to a parser, or to a group of options."""


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        module: has its `run`.
        help: one line.
        about: what it does; examples: command lines.
    """

    name: str
    module: str
    help: str
    about: str
    examples: str
    options: tuple[Option, ...]

    def parser(self, commands: Any) -> argparse.ArgumentParser:
        """Its parser, among those of other commands."""
        found: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.help,
            description=self.about,
            epilog=f"example:\n{self.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add in (*self.options, JSON, DEBUG):
            add(found)
        return found


def option(*names: str, **settings: Any) -> Option:
    """One option, as argparse takes it."""
    return lambda parser: parser.add_argument(*names, **settings)


def flag(name: str, help: str) -> Option:
    """An option without a value."""
    return option(name, action="store_true", help=help)


def one_of(*options: Option, required: bool = False) -> Option:
    """Options that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for each in options:
            each(group)

    return add


def at_least(least: int) -> Callable[[str], int]:
    """A whole number of at least so many."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not {least} or more")
        return value

    return number


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value


POSITIVE = at_least(1)
SOME_PLAN = "a recipe (dp=2,tp=2), a plan file, or path.py:function"

FILE = option(
    "file", metavar="FILE", help="a Python file with model() and example(), or hf:FOLDER, hf:LlamaConfig(...)"
)
PLAN = option("--plan", required=True, metavar="P", help=SOME_PLAN)
DEVICES = option("--devices", type=POSITIVE, metavar="N", help="as many as the plan needs if not given")
DEVICE = option("--device", metavar="D", help="cpu, cuda, ...: accelerators if each process has one, if not given")
BACKEND = option("--backend", metavar="B", help="of torch.distributed: gloo, nccl; that of the device if not given")
TIMEOUT = option("--timeout", type=seconds, metavar="S", help="that one collective may take (default 60)")
LINKS = option("--links", metavar="FILE", help="what communication costs, as written by weft profile")
PRECISION = option("--precision", metavar="D", help="compute in bf16 or fp16, with float32 masters of the weights")
SEED = option("--seed", type=int, default=0, metavar="S", help="of the random stream (default 0)")
JSON = flag("--json", "one JSON object as the last line")
DEBUG = flag("--debug", "show the stack trace of an error")

OPS = Command(
    "ops",
    "weft.commands.ops",
    "what a model is made of, and what of it may be cut",
    "Each operator: how often, its share of the floating-point work and of the memory traffic, the\n"
    "rule that says how it may be cut and where that rule comes from. What has no rule runs copied on every\n"
    "device, and its share says what that costs. Below the table: the share of the work that a plan cuts, and\n"
    "the rest by name; with --cluster how long the operators take by themselves on its devices.",
    "  weft ops examples/gpt.py\n  weft ops examples/gpt.py --plan dp=2,tp=2 --json",
    (
        FILE,
        option("--plan", default="tp=2", metavar="P", help=f"{SOME_PLAN} (default tp=2)"),
        option("--cluster", metavar="C", help="tell too how long operators take on the devices of a cluster"),
    ),
)

VERIFY = Command(
    "verify",
    "weft.commands.verify",
    "is a plan, or a program, equal to one device?",
    "Compare loss, every gradient and the weights after two optimizer steps, on emulated devices,\n"
    "with the eager model, in float64. With --program the code in DIR runs as it lies there, edited or not;\n"
    "it is said which. With --processes the generated code runs on true processes.\n"
    "Exit code 0 if equal, 1 if not, 2 on errors.",
    "  weft verify examples/gpt.py --plan dp=2,tp=2 --processes\n"
    "  weft show examples/gpt.py --plan dp=2,tp=2 --out program && weft verify examples/gpt.py --program program",
    (
        FILE,
        one_of(
            option("--plan", metavar="P", help=SOME_PLAN),
            option("--program", metavar="DIR", help="a generated program, instead of a plan"),
            required=True,
        ),
        DEVICES,
        flag("--processes", "on true processes instead of emulated devices"),
        DEVICE,
        BACKEND,
        TIMEOUT,
        LINKS,
        PRECISION,
        SEED,
        flag("--all", "name all kinds of operators and all events, however many there are"),
    ),
)

SHOW = Command(
    "show",
    "weft.commands.show",
    "what a plan makes of a model: table, program, code",
    "Without a flag: the plan by module, layers that repeat in one row, with what is cut, on which\n"
    "devices, by which collectives and how many bytes a device sends in a step.\n"
    "A plan in stages or micro-batches is shown by stage; --schedule draws its time table.\n"
    "--memory tells the bytes that each rank will hold, by kind; --measure runs two steps on processes and tells\n"
    "what they held beside it.\n"
    "With --code, --program or --json stdout holds that and nothing else.",
    "  weft show examples/gpt.py --plan dp=2,tp=2\n"
    "  weft show examples/gpt.py --plan dp=2,tp=2 --code | less\n"
    "  weft show examples/gpt.py --plan dp=2,tp=2 --out program\n"
    "  weft show examples/gpt.py --plan pp=2,microbatches=4 --schedule\n"
    "  weft show examples/gpt.py --plan dp=2,zero=3 --memory",
    (
        FILE,
        PLAN,
        DEVICES,
        LINKS,
        PRECISION,
        one_of(
            flag("--code", "the generated program"),
            flag("--program", "the Program before it becomes code, one line a step"),
            flag("--schedule", "the time table of a plan in stages or micro-batches"),
            flag("--memory", "bytes that each rank will hold, by kind; nothing is run"),
        ),
        flag("--measure", "with --memory: run two steps on processes too, and tell what they held"),
        option("--out", metavar="DIR", help="write the program's files there"),
        flag("--force", "with --out: overwrite a program that was edited"),
    ),
)

TRAIN = Command(
    "train",
    "weft.train.command",
    "train on processes of this machine",
    "Compile the model for the plan, start processes and train: on data() of the file, on a text or\n"
    "arrays (--data), or on example() again and again. A program in the cache that was edited is run as it is,\n"
    "and that is said. Exit code 0 if all went well, 2 on errors, 130 after Ctrl-C.\n\n"
    "A text becomes bytes if the model knows 256 tokens, else its sorted characters numbered from 0; `labels` get\n"
    "the same piece as the inputs, other integer inputs the piece one token further on. Arrays (.npy, .npz,\n"
    ".safetensors) are named like the forward's arguments. The last tenth is kept for --eval-every.",
    "  weft train examples/gpt.py --plan dp=2 --steps 100\n"
    "  weft train examples/gpt.py --plan tp=2 --steps 100 --lr 3e-3 --schedule cosine --warmup 10 --clip 1 --save run\n"
    "  weft train examples/gpt.py --plan dp=2 --steps 200 --lr 3e-3 --resume run",
    (
        FILE,
        PLAN,
        option(
            "--devices",
            type=POSITIVE,
            metavar="N",
            help="processes; k times as many as the plan needs train k replicas",
        ),
        DEVICE,
        BACKEND,
        TIMEOUT,
        option("--steps", type=POSITIVE, default=10, metavar="K", help="optimizer steps in all (default 10)"),
        option("--data", metavar="FILE", help="a text, or arrays (.npy, .npz, .safetensors)"),
        option("--lr", type=float, metavar="X", help="of AdamW, instead of the optimizer of the file"),
        option("--schedule", choices=("constant", "cosine", "linear"), default="constant", help="of the learning rate"),
        option("--warmup", type=at_least(0), default=0, metavar="N", help="steps in which the rate rises"),
        PRECISION,
        option(
            "--init",
            choices=("exact", "counter"),
            default="exact",
            help="values as on one device, or counted (large models)",
        ),
        option("--weights", metavar="PATH", help="start from a safetensors file, folder, index or state dict"),
        option("--clip", type=float, metavar="X", help="the largest norm of all gradients together"),
        option("--eval-every", type=POSITIVE, metavar="K", help="evaluate on eval_data(), or the end of --data"),
        option("--save", metavar="DIR", help="write model, optimizer and step there at the end"),
        option(
            "--save-every",
            type=POSITIVE,
            metavar="K",
            help="and every K steps; a state that is written replaces the one before",
        ),
        option("--resume", metavar="DIR", help="go on from what --save has written, under this plan or another"),
        option("--tensorboard", metavar="DIR", help="write events there"),
        option(
            "--memory-limit", metavar="SIZE", help="refuse a plan whose ranks will hold more in tensors: 2GiB, 500MB"
        ),
        option("--cache", default=".weft", metavar="DIR", help="where programs are kept (default .weft)"),
        SEED,
    ),
)

CLUSTER = option(
    "--cluster", default="cpu", metavar="C", help="2x8-A100-80GB, 4x8-H100, dgx2-v100x32, a YAML file; cpu if not given"
)
MEASURED = option("--profile", metavar="FILE", help="what was measured; the user's own if not given")
MEASURE = flag("--measure", "measure on this machine what the profile lacks before")

PROFILE = Command(
    "profile",
    "weft.commands.profile",
    "measure what communication, and a model's operators, cost here",
    "Without FILE: start processes on this machine, time every kind of collective, and write the table of costs.\n"
    "With FILE and --plan: time the operators of a step of that plan, each distinct one once, and the collectives\n"
    "between as many processes, and keep them in the user's profile, for weft simulate.",
    "  weft profile -o links.json && weft verify FILE --plan tp=2 --links links.json\n"
    "  weft profile examples/gpt.py --plan dp=2",
    (
        option("file", metavar="FILE", nargs="?", help="a model file, as of weft show"),
        option("--plan", metavar="P", help=SOME_PLAN),
        PRECISION,
        MEASURED,
        option("--backend", default="gloo", help="of torch.distributed (default gloo)"),
        option("--processes", type=POSITIVE, default=2, metavar="N", help="how many to start (default 2)"),
        option("-o", "--output", default="links.json", metavar="FILE", help="default links.json"),
    ),
)

SIMULATE = Command(
    "simulate",
    "weft.commands.simulate",
    "how long a step will take, and what it needs, on a cluster",
    "Nothing is run. The program's own code is recorded on tensors without content, and played on the cluster:\n"
    "computation, communication and what overlaps, waits of stages, memory over time. Several plans, separated by\n"
    "semicolons, are ranked. Times are those of data sheets, or measured ones where the cluster is this machine.",
    '  weft simulate examples/gpt.py --plan "dp=8;tp=8;dp=2,tp=4" --cluster 8-A100-80GB\n'
    "  weft simulate examples/gpt.py --plan dp=2 --measure\n"
    "  weft simulate examples/gpt.py --plan dp=8,zero=3 --cluster 8-H100 --largest batch",
    (
        FILE,
        option("--plan", required=True, metavar="P", help=f"{SOME_PLAN}; several: 'dp=2;tp=2'"),
        CLUSTER,
        DEVICES,
        PRECISION,
        MEASURED,
        MEASURE,
        option("--largest", choices=("batch", "sequence"), help="look for the largest batch, or sequence, that fits"),
        option("--timeline", metavar="FILE", help="write the time line there, for Perfetto"),
    ),
)

EXPLAIN = Command(
    "explain",
    "weft.commands.explain",
    "what determines how long a step takes, and what would change it",
    "The critical path of a simulated step, by line of the model and kind; what devices wait for; and how long the\n"
    "step takes with twice the bandwidth, half the latency, or devices twice as fast.",
    "  weft explain examples/gpt.py --plan dp=4,tp=2 --cluster 8-A100-80GB",
    (FILE, PLAN, CLUSTER, DEVICES, PRECISION, MEASURED, MEASURE),
)

DOCTOR = Command(
    "doctor",
    "weft.commands.doctor",
    "what this machine has, and whether ranks can communicate on it",
    "Versions, devices, backends, environment variables that look wrong, and what Weft would choose here. Then\n"
    "processes are started, each collective is run, checked and timed, and a tiny model is verified under dp and\n"
    "tp. Every line is ok, a warning or failed, with what to do.\n"
    "Exit code 0 if nothing failed, 1 if something did, 2 on errors.",
    "  weft doctor\n  weft doctor --device cpu --ranks 4\n  weft doctor --no-run",
    (
        option("--ranks", type=POSITIVE, metavar="N", help="processes; one for each device, or 2, if not given"),
        DEVICE,
        BACKEND,
        TIMEOUT,
        flag("--no-run", "only print what is there"),
    ),
)

COMPLETION = Command(
    "completion",
    "weft.commands.completion",
    "a script that completes commands and options in a shell",
    "Print a script for the shell. It knows every command and option.",
    "  weft completion bash > ~/.local/share/bash-completion/completions/weft\n"
    "  weft completion zsh >> ~/.zshrc\n"
    "  weft completion fish > ~/.config/fish/completions/weft.fish",
    (option("shell", choices=("bash", "zsh", "fish")),),
)

COMMANDS = (OPS, VERIFY, SHOW, SIMULATE, EXPLAIN, TRAIN, PROFILE, DOCTOR, COMPLETION)
