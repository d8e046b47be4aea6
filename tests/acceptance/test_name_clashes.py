"""Whatever the parts of a model are called, generated code runs, and gives the numbers of one device.

Names are those of the runtime's classes, of Python and of the generated text (`clashes.py`), each as a submodule, a
parameter, a buffer, a list of layers, a module that holds one, a parameter in a module of the same name, and a
parameter of each layer of a list. Several names share a model. A sample runs always, all names where `full` tests do.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.acceptance import clashes
from tests.acceptance.clashes import FORMS, clashing, example
from weft.compile import compile_program
from weft.verify.program_dir import verify_program

PLANS = ("dp=2,zero=3", "pp=2,microbatches=1")
SAMPLE = ("inner", "stored", "comm", "sums", "device", "step", "forward_backward", "class", "1", "torch", "_weight")
SHARES = 20
"""Into which all names fall: those of a share stand in one model."""


def is_trained_the_same(form: str, names: tuple[str, ...], plan: str) -> None:
    """Two steps, as a user takes them: the same losses and the same state."""
    eager = clashing(form, names)
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


def is_verified(form: str, names: tuple[str, ...], plan: str, folder: Path) -> None:
    """Through the program as it was written to a folder."""
    model = clashing(form, names)
    for name, content in compile_program(model, example(), plan).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    result = verify_program(model, example(), program=folder)
    assert result.equal, result


@cache
def all_names() -> tuple[str, ...]:
    return tuple(clashes.names())


def test_names_are_found() -> None:
    """Of classes, of modules at work, of the text, of Python."""
    assert {"forward_backward", "hold", "comm", "step", "GRID", "torch", "class", "print", "1"} <= set(all_names())
    assert len(all_names()) > 200


@pytest.mark.parametrize("form", FORMS)
def test_sample(form: str, tmp_path: Path) -> None:
    is_trained_the_same(form, SAMPLE, PLANS[0])
    is_verified(form, SAMPLE, PLANS[1], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("form", FORMS)
def test_all(form: str, share: int, tmp_path: Path) -> None:
    names = all_names()[share::SHARES]
    for plan in PLANS:
        is_trained_the_same(form, names, plan)
        is_verified(form, names, plan, tmp_path / plan)
