"""2,000 training steps on two processes against one: do the loss curves stay together?

    python bench/curves.py [--steps 2000] [--out bench/results/curves.json] [--figure docs/curves.svg]

The GPT of examples/gpt.py, dropout on, learns its text: the eager module in this process, and its program under each
plan on two gloo processes, in float64 and in float32. Losses of all steps are kept, and drawn if matplotlib is there.
As a control the eager module trains once more with one weight changed in its last bits: so far does training itself
carry a difference of rounding. (At four times this learning rate it carries it to 0.01 in 1,200 steps.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from weft.compile.model_file import load_model_file
from weft.runtime.random import Stream
from weft.train.command import Settings, train_file
from weft.verify.draw_mode import DrawMode

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "gpt.py"
PLANS = ("dp=2", "megatron=2")
DTYPES = ("float64", "float32")
EVERY = 20
ALONE, CONTROL = "one process", "control: one process, last bits of one weight changed"

MODEL_FILE = '''"""The example in another precision."""

import sys

import torch

sys.path.insert(0, {folder!r})
import gpt


def model():
    return gpt.model().to(torch.{dtype})


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


example, data = gpt.example, gpt.data
'''


def eager(path: Path, steps: int, *, disturbed: bool = False) -> list[float]:
    """The losses of the module as it is, with the random draws that programs make."""
    subject = load_model_file(path)
    assert subject.data is not None
    if disturbed:
        with torch.no_grad():
            weight = next(subject.model.parameters()).view(-1)[0]
            weight *= 1 + 4 * torch.finfo(weight.dtype).eps
    optimizer = subject.optimizer(list(subject.model.parameters()))
    losses: list[float] = []
    while len(losses) < steps:
        for batch in subject.data():
            optimizer.zero_grad(set_to_none=True)
            with DrawMode(Stream(0, len(losses), 0)):
                loss = subject.model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


def curves(dtype: str, steps: int) -> dict[str, list[float]]:
    """Losses of one process and of each plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(MODEL_FILE.format(folder=str(EXAMPLE.parent), dtype=dtype))
        found = {ALONE: eager(path, steps), CONTROL: eager(path, steps, disturbed=True)}
        for plan in PLANS:
            found[plan] = list(train_file(path, plan, Settings(steps=steps)).losses)
            first, last, most = found[plan][0], found[plan][-1], max(apart(found, plan))
            print(f"{dtype} {plan}: loss {first:.4f} -> {last:.4f}, at most {most:.1e} apart", flush=True)
    return found


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Curves above, the largest difference so far below."""
    figure, below, steps = begin_figure(found["float32"], (ALONE, *PLANS), "float32")
    for dtype, runs in found.items():
        for plan in (*PLANS, CONTROL):
            largest = list(itertools.accumulate(apart(runs, plan), max, initial=1e-17))[1::EVERY]
            style = ":" if plan == CONTROL else "-"
            below.semilogy(steps, largest, style, linewidth=1.2, label=f"{dtype}, {plan}")
    below.set(xlabel="step", ylabel="largest difference from one process so far", ylim=(1e-17, 1e-2))
    end_figure(figure, below, path)


def begin_figure(runs: dict[str, list[float]], names: Sequence[str], dtype: str) -> tuple[Any, Any, range]:
    """A figure with the curves of some runs above: what to draw below them, and the steps of its points."""
    from matplotlib import pyplot  # noqa: PLC0415 - only those who draw need it

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    steps = range(0, len(runs[ALONE]), EVERY)
    for name, style in zip(names, ("-", "--", ":"), strict=True):
        above.plot(steps, means(runs[name]), style, label=name, linewidth=1.6)
    above.set_ylabel(f"loss ({dtype}, means of {EVERY} steps)")
    above.legend()
    return figure, below, steps


def end_figure(figure: Any, below: Any, path: Path) -> None:
    below.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def means(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[at : at + EVERY]) for at in range(0, len(losses), EVERY)]


def apart(runs: dict[str, list[float]], plan: str) -> list[float]:
    """Step by step, how far a plan's loss is from that of one process."""
    return [abs(a - b) for a, b in zip(runs[plan], runs[ALONE], strict=True)]


def asked(doc: str | None, out: str) -> argparse.Namespace:
    """What the command line asks for: how many steps, and where results and a figure go."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / out)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return options


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Keep what was found."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "steps": options.steps, "means_of": EVERY, **found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    options = asked(__doc__, "curves.json")
    found = {dtype: curves(dtype, options.steps) for dtype in DTYPES}
    most = {dtype: {plan: max(apart(runs, plan)) for plan in (*PLANS, CONTROL)} for dtype, runs in found.items()}
    kept = {dtype: {name: means(losses) for name, losses in runs.items()} for dtype, runs in found.items()}
    write(options, {"apart": most, "losses": kept})
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
