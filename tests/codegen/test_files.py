"""Generated programs on disk: they run where the compiler cannot be imported, and an edited one is recognised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.acceptance.subjects import prepared
from weft.codegen import generate
from weft.codegen.stored import Entry, table_lines
from weft.compile.cache import write_files
from weft.ir.program import Program
from weft.lower import lower
from weft.plan.load import load_plan
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import PROGRAM, changes, files_of
from weft.runtime.program.load import load_program
from weft.runtime.program.module import ParallelModule
from weft.runtime.random import Stream


def program(model: str, plan: str) -> Program:
    return lower(load_plan(plan, prepared(model)[1]))


def emit(found: Program, folder: Path, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    write_files(folder, generate(found, **settings))


def inputs(model: str) -> list[torch.Tensor]:
    example = prepared(model)[0].example
    return list(example.values()) if isinstance(example, dict) else list(example)


ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] in [["weft", room] for room in %r]:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
import torch
from weft.runtime.links.emulator import run_ranks
from weft.runtime.program.load import load_program

def body(transport):
    torch.manual_seed(0)
    module = load_program(sys.argv[1], transport)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    loss = module(torch.ones(6, 8, dtype=torch.long), torch.ones(6, 8, dtype=torch.long))
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    return loss.item()

first, *others = run_ranks(4, body)
assert all(other == first for other in others)
print(first)
"""
ROOMS = ["ir", "ops", "plan", "capture", "cost", "lower", "codegen", "verify", "cli", "compile", "train"]


def test_runs_without_the_compiler(tmp_path: Path) -> None:
    emit(program("gpt-tied", "dp=2,tp=2"), tmp_path)
    command = [sys.executable, "-c", ALONE % ROOMS, str(tmp_path)]
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) > 0


def test_the_same_bytes_every_time() -> None:
    assert generate(program("gpt2", "dp=2")) == generate(program("gpt2", "dp=2"))


def test_an_edit_is_seen(tmp_path: Path) -> None:
    emit(program("mlp", "dp=2"), tmp_path)
    assert not changes(tmp_path)
    assert files_of(tmp_path).about == files_of(generate(program("mlp", "dp=2"))).about
    path = tmp_path / "program.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("gelu = ", "print('here')\n        gelu = "), encoding="utf-8")
    assert changes(tmp_path)
    path.write_text(text, encoding="utf-8")
    assert not changes(tmp_path)
    path.unlink()
    assert changes(tmp_path)


def test_an_edited_program_runs(tmp_path: Path) -> None:
    emit(program("mlp", "dp=2"), tmp_path)
    path = tmp_path / "program.py"
    path.write_text(path.read_text(encoding="utf-8").replace("F.gelu(up)", "up + 1"), encoding="utf-8")

    def body(transport: Transport) -> list[float]:
        module = load_program(tmp_path, transport)
        loss = module(torch.zeros(6, 8), torch.ones(6, 8))
        loss.backward()
        return [loss.item(), float(module.down.weight.grad.abs().sum())]

    # every weight is zero, so gelu would give the second linear nothing to learn from
    loss, gradient = run_ranks(2, body)[0]
    assert loss == 1 and gradient > 0


def test_for_other_devices_it_is_refused(tmp_path: Path) -> None:
    emit(program("mlp", "dp=2"), tmp_path)
    with pytest.raises(Exception, match="for 2 devices"):
        run_ranks(3, lambda transport: load_program(tmp_path, transport))


def on_ranks(model: str, plan: str, folder: Path, body: object) -> list[object]:
    emit(program(model, plan), folder)

    def run(transport: Transport) -> object:
        torch.manual_seed(0)
        module = load_program(folder, transport)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return body(module)  # type: ignore[operator]

    return run_ranks(2, run)


def test_is_a_module(tmp_path: Path) -> None:
    """Original names, tied ones under both; state dicts go out and in; train and eval are torch's."""

    def body(module: ParallelModule) -> None:
        subject = prepared("gpt-tied")[0]
        assert module.state_dict().keys() == subject.model.state_dict().keys()
        assert {name for name, _ in module.named_parameters()} == {n for n, _ in subject.model.named_parameters()}
        assert module.lm_head.weight is module.transformer.wte.weight
        assert module.transformer.h[1].attn.c_attn.weight.shape == (48, 16)
        assert len(module.transformer.h) == 2
        state = {name: tensor.clone() + 1 for name, tensor in module.state_dict().items()}
        module.load_state_dict(state)
        assert torch.equal(module.lm_head.weight, state["lm_head.weight"])
        assert not module.eval().training

    on_ranks("gpt-tied", "dp=2", tmp_path, body)


def test_gradients_accumulate(tmp_path: Path) -> None:
    """Two backwards add up; one through the sum of two forwards gives the same; without grad mode nothing is kept."""

    def body(module: ParallelModule) -> None:
        def loss(step: int) -> torch.Tensor:
            module.stream = Stream(1, step, 0)
            return module(*inputs("gpt-tied"))

        loss(0).backward()
        once = {name: p.grad.clone() for name, p in module.named_parameters()}
        loss(1).backward()
        twice = {name: p.grad.clone() for name, p in module.named_parameters()}
        assert any(not torch.equal(once[name], twice[name]) for name in once)
        module.zero_grad()
        (loss(0) + loss(1)).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, twice[name])
        module.zero_grad()
        (loss(0) * 2).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, once[name] * 2)
        module.zero_grad()
        with torch.no_grad():
            assert not loss(0).requires_grad
        (module.lm_head.weight * 3).sum().backward()
        assert torch.equal(module.lm_head.weight.grad, torch.full_like(module.lm_head.weight, 3))

    on_ranks("gpt-tied", "dp=2", tmp_path, body)


def test_description(tmp_path: Path) -> None:
    emit(program("mlp", "dp=2"), tmp_path, about={"plan": "dp=2"})
    about = json.loads((tmp_path / PROGRAM).read_text(encoding="utf-8"))
    assert (about["devices"], about["plan"]) == (2, "dp=2")
    assert [where for _, where, _, _ in about["batch"]["tensors"]] == ["x", "y"]
    (piece,) = about["sizes"][0]["pieces"]
    assert (piece["class"], piece["folder"], piece["files"]) == ("MLP", "", ["program.py"])


def test_a_long_entry_of_a_table_has_a_line_for_each_argument() -> None:
    cut = 'Cut("a", sizes=(0, 4))'
    text = f"Part((4, 1), {{0: {cut}}}, dtype=torch.float64, reads=2, use=[all_gather(0, {cut}, of=4)])"
    lines = table_lines("PARAMETERS", [Entry("short", "Part((4,))"), Entry("long", text)])
    assert lines == [
        "PARAMETERS: dict[str, Part] = {",
        '    "short": Part((4,)),',
        '    "long": Part(',
        "        (4, 1),",
        f"        {{0: {cut}}},",
        "        dtype=torch.float64,",
        "        reads=2,",
        f"        use=[all_gather(0, {cut}, of=4)],",
        "    ),",
        "}",
    ]
