"""2,000 training steps in bfloat16 on four processes against one: do the loss curves stay together?

    python bench/curves_mixed.py [--steps 2000] [--out bench/results/curves_mixed.json] [--figure FILE.svg]

The GPT of examples/gpt.py, dropout on, learns its text, computing in bfloat16 with masters in float32: the eager module
in this process, by the definition of its precision (`weft/verify/mixed.py`), and its program under `dp=2,tp=2,zero=2`
on four gloo processes. In bfloat16 no two orders of a sum give the same bits, and training carries the difference on;
so there are two controls: one process that begins with one weight changed in its last bits, and one in float32. The
plan follows one process if it is about as far from it as the first control is.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

import torch

from bench.curves import (
    ALONE,
    CONTROL,
    EXAMPLE,
    MODEL_FILE,
    apart,
    asked,
    begin_figure,
    eager,
    end_figure,
    means,
    write,
)
from weft.compile.model_file import load_model_file
from weft.runtime.random import Stream
from weft.runtime.weights.precision import Precision
from weft.train.command import Settings, train_file
from weft.verify.draw_mode import DrawMode
from weft.verify.mixed import OneDevice

PLAN = "dp=2,tp=2,zero=2"
FLOAT32 = "one process, float32"


def by_definition(path: Path, steps: int, *, disturbed: bool = False) -> list[float]:
    """The losses of the eager module in bfloat16, with the random draws that programs make."""
    subject = load_model_file(path)
    assert subject.data is not None
    module = subject.model
    one = OneDevice(module, Precision(torch.bfloat16))
    if disturbed:
        with torch.no_grad():
            # the last bits that its copy still sees
            next(iter(one.masters.values())).view(-1)[0] *= 1 + 2 * torch.finfo(torch.bfloat16).eps
    optimizer = subject.optimizer(list(one.masters.values()))
    losses: list[float] = []
    for batch in itertools.chain.from_iterable(subject.data() for _ in itertools.count()):
        optimizer.zero_grad(set_to_none=True)
        one.refresh()
        with DrawMode(Stream(0, len(losses), 0)), one.forward():
            loss = module(*one.inputs(batch))
        loss.backward()
        one.add()
        one.finish()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break
    return losses


def curves(steps: int) -> dict[str, list[float]]:
    """Losses of one process, of the plan, of the controls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(MODEL_FILE.format(folder=str(EXAMPLE.parent), dtype="float32"))
        found = {ALONE: by_definition(path, steps), PLAN: []}
        found[PLAN] = list(train_file(path, PLAN, Settings(steps=steps, precision="bf16")).losses)
        found[CONTROL], found[FLOAT32] = by_definition(path, steps, disturbed=True), eager(path, steps)
    return found


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Curves above, how far they are from one process below."""
    figure, below, steps = begin_figure(found, (ALONE, PLAN, FLOAT32), "bfloat16")
    for name, style in zip((PLAN, CONTROL, FLOAT32), ("-", ":", "--"), strict=True):
        below.semilogy(steps, means(apart(found, name)), style, linewidth=1.2, label=name)
    below.set(xlabel="step", ylabel="difference from one process")
    end_figure(figure, below, path)


def main() -> None:
    options = asked(__doc__, "curves_mixed.json")
    found = curves(options.steps)
    distances = {name: apart(found, name) for name in (PLAN, CONTROL, FLOAT32)}
    told = {name: {"mean": statistics.fmean(one), "most": max(one)} for name, one in distances.items()}
    for name, one in told.items():
        print(f"{name}: from one process {one['mean']:.1e} in the mean, {one['most']:.1e} at most")
    kept = {name: means(losses) for name, losses in found.items()}
    write(options, {"apart": told, "last": {name: one[-1] for name, one in kept.items()}, "losses": kept})
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
