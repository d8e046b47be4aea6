"""2,000 training steps on two processes against one: do the loss curves stay together?

    python bench/curves.py [--steps 2000] [--out bench/results/curves.json] [--figure docs/curves.svg]

The GPT of examples/gpt.py, dropout on, learns its text: the eager module in this process, and its program under each
plan on two gloo processes, in float64 and in float32. Losses of all steps are kept, and drawn if matplotlib is there.
In float64 the difference shows nothing but the order of additions; in float32 training itself magnifies that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.overhead import machine
from weft.runtime.drawmode import DrawMode
from weft.runtime.random import Stream
from weft.train.command import Settings, train_file
from weft.verify.model_file import load_model_file

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "gpt.py"
PLANS = ("dp=2", "megatron=2")
DTYPES = ("float64", "float32")

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


def eager(path: Path, steps: int) -> list[float]:
    """The losses of the module as it is, with the random draws that programs make."""
    subject = load_model_file(path)
    assert subject.data is not None
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
        found = {"one process": eager(path, steps)}
        for plan in PLANS:
            found[plan] = list(train_file(path, plan, Settings(steps=steps)).losses)
            apart = max(abs(a - b) for a, b in zip(found[plan], found["one process"], strict=True))
            print(f"{dtype} {plan}: loss {found[plan][0]:.4f} -> {found[plan][-1]:.4f}, at most {apart:.1e} apart", flush=True)
    return found


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Curves above, differences below."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    narrow = found["float32"]
    for (name, losses), style in zip(narrow.items(), ("-", "--", ":"), strict=True):
        above.plot(losses, style, label=name, linewidth=1.2)
    above.set_ylabel("loss (float32)")
    above.legend()
    for dtype, runs in found.items():
        for plan in PLANS:
            apart = [abs(a - b) or 1e-18 for a, b in zip(runs[plan], runs["one process"], strict=True)]
            below.semilogy(apart, linewidth=0.8, label=f"{plan}, {dtype}")
    below.set(xlabel="step", ylabel="difference from one process", ylim=(1e-17, 1e-1))
    below.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "curves.json")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {dtype: curves(dtype, options.steps) for dtype in DTYPES}
    apart: dict[str, Any] = {
        dtype: {
            plan: max(abs(a - b) for a, b in zip(runs[plan], runs["one process"], strict=True)) for plan in PLANS
        }
        for dtype, runs in found.items()
    }
    every = max(1, options.steps // 50)
    kept = {dtype: {name: losses[::every] for name, losses in runs.items()} for dtype, runs in found.items()}
    record = {"machine": machine(), "steps": options.steps, "apart": apart, "every": every, "losses": kept}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
