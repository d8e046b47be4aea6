"""Whatever the parts of a model are called, generated code runs, and gives the numbers of one device.

Names are those of the runtime's classes, of Python and of the generated text (`clashes.py`), each as a submodule, a
parameter, a buffer, a list of layers, a module that holds one, a parameter in a module of the same name, and of each
layer of a list. Several names share a model. A sample runs always, all names where `full` tests do.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import weft
from tests.acceptance.clashes import clashing, example
from weft.compile import compile_program
from weft.verify.program_dir import verify_program

PLANS = ("dp=2,zero=3", "pp=2,microbatches=1")
TOGETHER = 10
"""Names that share a model."""
SAMPLE = ("inner", "stored", "comm", "sums", "device", "step", "forward_backward", "class", "1", "torch")


def is_trained_the_same(form: str, group: tuple[str, ...], plan: str) -> None:
    """Two steps, as a user takes them: the same losses and the same state."""
    eager = clashing(form, group)
    module: Any = weft.parallelize(copy.deepcopy(eager), example(), plan, emulate=True, cache=None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (eager, module)]
    for _ in range(2):
        optimizers[0].zero_grad()
        expected = eager(example())
        expected.backward()
        optimizers[0].step()
        torch.testing.assert_close(module.train_step(example(), optimizers[1]), expected.detach())
    found = module.state_dict()
    assert list(found) == list(eager.state_dict())
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def is_verified(form: str, group: tuple[str, ...], plan: str, folder: Path) -> None:
    """A program as it was written to a folder."""
    model = clashing(form, group)
    for name, content in compile_program(model, example(), plan).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    result = verify_program(model, example(), program=folder)
    assert result.equal, result
