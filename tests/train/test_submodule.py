"""Parts of an eager model, drawn across devices: outputs and gradients are those of the eager part."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.capture.api import capture
from weft.errors import CaptureError, CheckError, RunError
from weft.ir.program import Program, Reshard
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.runtime.random import Stream
from weft.verify.draw_mode import DrawMode

ROOT = Path(__file__).parents[2]
PLANS = ["dp=2", "tp=2", "dp=2,tp=2", "dp=2,zero=3", "dp=2,recompute=down"]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Found:
    z: Tensor
    pair: Pair


class Body(nn.Module):
    """Returns a tree: a tensor, the input itself, a weight, one tensor twice, integers, something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        h = F.gelu(self.up(x))
        z = self.norm(x + self.down(h) * scale)
        return {
            "found": Found(z, Pair(h, z)),
            "rest": [x, self.norm.weight, z.argmax(-1), None, 3],
        }


class Whole(nn.Module):
    """What stands around it runs the same everywhere."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before, self.body, self.after = nn.Linear(6, 8), body, nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, u: Tensor) -> Tensor:
        out = self.body(self.before(u), self.scale)
        x, weight, places, none, three = out["rest"]
        assert none is None and three == 3 and not places.requires_grad
        found = out["found"]
        loss: Tensor = self.after(found.z).square().mean() + found.pair.first.mean() + (x * weight).sum() / 7
        return loss + (found.pair.second * (places[:, None] == torch.arange(8))).sum()


def whole() -> tuple[Whole, Tensor]:
    torch.manual_seed(0)
    return Whole(Body()).double(), torch.randn(4, 6, dtype=torch.float64)


def double(*shape: int, grad: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, requires_grad=grad)


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("plan", PLANS)
def test_equal_to_the_eager_part(plan: str) -> None:
    eager, u = whole()
    mine = copy.deepcopy(eager)
    mine.body = weft.parallelize(mine.body, (double(4, 8), double()), plan, emulate=True, cache=None)
    for model in (eager, mine):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(u).backward()
            optimizer.step()
    close(mine(u), eager(u))
    for name in ("before.weight", "before.bias", "after.weight", "scale"):
        close(mine.get_parameter(name), eager.get_parameter(name))
        close(mine.get_parameter(name).grad, eager.get_parameter(name).grad)
    for name, tensor in eager.body.state_dict().items():
        close(mine.body.state_dict()[name], tensor)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training))
        return found


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,recompute=full", "tp=2"])
def test_two_forwards_and_one_backward(plan: str) -> None:
    """Each forward draws numbers of its own, and what is computed again draws those of its forward."""
    torch.manual_seed(0)
    eager = Noisy().double()
    mine = weft.parallelize(copy.deepcopy(eager), double(4, 8), plan, emulate=True, cache=None)
    inputs = [torch.randn(4, 8, dtype=torch.float64) for _ in range(2)]
    grads = []
    for parallel in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = []
        for step, leaf in enumerate(leaves):
            with DrawMode(Stream(0, step, 0)):
                results.append(mine(leaf) if parallel else eager(leaf))
        # the caller may change what it was given
        (results[0].relu_() * results[1]).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for found, wanted in zip(grads[1], grads[0], strict=True):
        close(found, wanted)


def test_a_part_frozen_for_the_time_being_gets_no_gradient() -> None:
    torch.manual_seed(0)
    mine = weft.parallelize(Noisy().double().eval(), double(4, 8), "dp=2", emulate=True, cache=None)
    mine.requires_grad_(False)
    x = double(4, 8)
    mine(x).sum().backward()
    assert x.grad is not None and bool(x.grad.any())
    assert all(parameter.grad is None for parameter in mine.parameters())
    mine.requires_grad_(True)
    mine(x).sum().backward()
    assert all(parameter.grad is not None for parameter in mine.parameters())


# two modules with different plans


def gan() -> Any:
    spec = importlib.util.spec_from_file_location("gan", ROOT / "examples" / "gan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expect_same_gan(losses: list[float], states: list[dict[str, Tensor]]) -> None:
    example = gan()
    eager = example.parts(torch.float64)
    torch.testing.assert_close(losses, example.train(*eager, 4, torch.float64), rtol=1e-12, atol=1e-13)
    for module, state in zip(eager, states, strict=True):
        for name, tensor in module.state_dict().items():
            close(state[name], tensor)


def test_gan_on_emulated_devices() -> None:
    example = gan()
    parallel = example.parallel(torch.float64, emulate=True)
    losses = example.train(*parallel, 4, torch.float64)
    expect_same_gan(losses, [module.state_dict() for module in parallel])


@pytest.mark.full
def test_gan_on_two_processes(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*argv, str(ROOT / "tests" / "train" / "gan_script.py"), str(tmp_path / "found")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"found{rank}", weights_only=True) for rank in range(2)]
    assert found[0][0] == found[1][0]
    losses, (generator, first) = found[0]
    _, (_, second) = found[1]
    whole = {name: first[name] for name in first}
    whole["up.weight"], whole["up.bias"] = (torch.cat([first[n], second[n]]) for n in ("up.weight", "up.bias"))
    whole["down.weight"] = torch.cat([first["down.weight"], second["down.weight"]], dim=1)
    expect_same_gan(losses, [generator, whole])


# the static check


def program(plan: str) -> Program:
    eager, _ = whole()
    graph = capture(eager.body, (double(4, 8), double()))
    return lower(load_plan(plan, graph), outputs="open")


def without_backward(made: Program, tensor: str) -> Program:
    """The gradients of some uses of a tensor stay where they are."""
    steps = tuple(
        replace(step, backward=())
        if isinstance(step, Reshard) and made.values[step.source].tensor == tensor and step.backward
        else step
        for step in made.steps
    )
    assert steps != made.steps
    return replace(made, steps=steps)


FAULTS: dict[str, Callable[[Program], Program]] = {
    "an output without gradient": lambda made: replace(made, roots=made.roots[1:]),
    "an output twice": lambda made: replace(made, roots=(*made.roots, made.roots[0])),
    "no gradient at all": lambda made: replace(made, roots=()),
    "an input is forgotten": lambda made: replace(made, entries={}),
    "an input's gradient stays in addends": lambda made: without_backward(made, "x"),
    "another value": lambda made: replace(made, roots=(made.entries["x"], *made.roots[1:])),
}


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_the_check_accepts(plan: str) -> None:
    report = check(program(plan))
    assert report.parameters >= 2 * 8


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds(fault: str) -> None:
    with pytest.raises(CheckError):
        check(FAULTS[fault](program("tp=2")))


# errors


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        return None


def test_no_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="no tensor"):
        weft.parallelize(Nothing(), torch.zeros(4, 3), "dp=2", emulate=True, cache=None)


def test_wrong_calls_are_refused() -> None:
    mine = weft.parallelize(Noisy(), torch.zeros(4, 8), "dp=2", emulate=True, cache=None)
    with pytest.raises(RunError, match=r"x of the batch is \[3, 8\]"):
        mine(torch.zeros(3, 8))
    with pytest.raises(RunError, match="x of the batch requires a gradient"):
        mine(torch.zeros(4, 8, requires_grad=True))
    with torch.no_grad():
        mine(torch.zeros(4, 8, requires_grad=True))
    loss = mine(torch.zeros(4, 8)).sum()
    loss.backward()
    with pytest.raises(RunError, match="a second time"):
        loss.backward()
    with pytest.raises(RunError, match="needs a loss"):
        mine.train_step(torch.zeros(4, 8), torch.optim.SGD(mine.parameters()))  # type: ignore[operator]
    # and the ranks go on
    mine(torch.zeros(4, 8)).sum().backward()


def test_unknown_outputs_are_refused() -> None:
    with pytest.raises(RunError, match="outputs is 'logits'"):
        weft.parallelize(Noisy(), torch.zeros(4, 8), "dp=2", emulate=True, outputs="logits")  # type: ignore[arg-type]


def test_backward_twice_without_emulation() -> None:
    mine = weft.parallelize(Noisy(), torch.zeros(4, 8), "dp=1", cache=None)
    loss = mine(torch.zeros(4, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RunError, match="a second time"):
        loss.backward()
