"""Bad input about state: optimizers, loss scales, ZeRO, memory. A clear error each: what, where, what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.cli import main
from weft.errors import WeftError

FILE = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0), Mean())


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def example():
    return torch.ones(4, 6)


def optimizer(parameters):
    {line}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).mean()


EXAMPLE = torch.ones(4, 6)


def parallel(plan: str = "dp=2,zero=2", module: nn.Module | None = None, **settings: Any) -> Any:
    return weft.parallelize(module or Net(), EXAMPLE, plan=plan, emulate=True, cache=None, **settings)


def step(make: Callable[[list[nn.Parameter]], Any], plan: str = "dp=2,zero=2") -> None:
    module = parallel(plan)
    module.train_step(EXAMPLE, make(list(module.parameters())))


def own_loop(make: Callable[[list[nn.Parameter]], Any]) -> None:
    module = parallel()
    optimizer = make(list(module.parameters()))
    module.forward_backward(EXAMPLE)
    optimizer.step()


def of_another_module() -> None:
    step(lambda held: torch.optim.AdamW(Net().parameters()))


def of_before() -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())
    parallel(module=module).train_step(EXAMPLE, optimizer)


def of_before_in_a_loop() -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())
    parallel(module=module).forward_backward(EXAMPLE)
    optimizer.step()


def in_two_optimizers() -> None:
    step(lambda held: [torch.optim.AdamW(held), torch.optim.SGD(held[:1])])


def doubled(held: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch refuses a parameter in two groups by itself, and no more than warns of one that is twice in one."""
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return torch.optim.SGD([*held, held[0]])


def overflow_for_ever() -> None:
    module = parallel("tp=2")
    scaler, optimizer = weft.GradScaler("cpu"), torch.optim.SGD(module.parameters())
    held = list(module.parameters())
    while True:
        for one in held:
            one.grad = torch.full_like(one, math.inf)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()


def zero_alone() -> None:
    graph = weft.capture(Net(), EXAMPLE)
    weft.plan.zero(weft.plan.tp(weft.Plan(graph, devices=2), 2), 2)


CASES: dict[str, tuple[Callable[[], None], str, str]] = {
    "another module's parameters": (of_another_module, "holds no parameter of the module", "parallel.parameters()"),
    "some parameters": (
        lambda: step(lambda held: torch.optim.SGD(held[:-1])),
        "does not hold",
        "requires_grad_(False)",
    ),
    "made before parallelize": (of_before, "given to parallelize()", "make the optimizer afterwards"),
    "made before, stepped by hand": (of_before_in_a_loop, "given to parallelize()", "make the optimizer afterwards"),
    "one parameter in two optimizers": (in_two_optimizers, "up.weight stands more than once", "one group of one"),
    "one parameter twice in a group": (lambda: step(doubled), "up.weight stands more than once", "one group of one"),
    "the same, stepped by hand": (lambda: own_loop(doubled), "up.weight stands more than once", "one group of one"),
    "an optimizer that mixes": (
        lambda: step(torch.optim.Adafactor, "dp=2,zero=3"),
        "Adafactor mixes the elements of a parameter",
        "`spread`",
    ),
    "a loss scale that overflows for ever": (overflow_for_ever, "not finite in 64 steps", "bfloat16"),
    "zero without replicas": (lambda: parallel("tp=2,zero=2") and None, "there is no dp", "dp=2,tp=2,zero=2"),
    "zero of a plan without replicas": (zero_alone, "no op is cut along 'dp'", "dp=2,tp=2,zero=2"),
    "groups that do not divide": (lambda: parallel("dp=4,zero=2,zero_groups=3") and None, "zero_groups=3", "1 or 2"),
    "a memory limit": (lambda: parallel(memory_limit="99B") and None, "99 B are allowed: ", "zero=3"),
    "no memory limit": (lambda: parallel(memory_limit="-3") and None, "'-3' is no amount of memory", "GiB"),
}


def refused(call: Callable[[], object], message: str, remedy: str, kind: type[WeftError] = WeftError) -> WeftError:
    """The error of a call that must not go through."""
    with pytest.raises(kind) as raised:
        call()
    assert message in raised.value.message, raised.value
    assert remedy in raised.value.remedy, raised.value
    assert raised.value.place, raised.value
    return raised.value


@pytest.mark.parametrize("case", CASES)
def test_python(case: str) -> None:
    refused(*CASES[case])


COMMANDS: dict[str, tuple[str, list[str], tuple[str, ...]]] = {
    "one parameter in two groups": (
        "return torch.optim.SGD([{'params': parameters}, {'params': parameters[:1]}])",
        ["--plan", "dp=2,zero=1"],
        ("more than one parameter group", "net.py:20", "optimizer(parameters)"),
    ),
    "one parameter in two optimizers": (
        "return [torch.optim.SGD(parameters), torch.optim.AdamW(parameters[:1])]",
        ["--plan", "dp=2,zero=1"],
        ("more than one parameter group", "net.py", "optimizer(parameters)"),
    ),
    "another module's parameters": (
        "return torch.optim.SGD(model().parameters())",
        ["--plan", "dp=2,zero=1"],
        ("updates 4 tensors that are not among", "shape [8, 6]", "net.py", "make it over"),
    ),
    "zero without replicas": (
        "return torch.optim.SGD(parameters)",
        ["--plan", "tp=2,zero=3"],
        ("there is no dp", "recipe 'tp=2,zero=3'", "dp=2,tp=2,zero=3"),
    ),
    "an optimizer that mixes": (
        "return torch.optim.Adafactor(parameters)",
        ["--plan", "dp=2,zero=2"],
        ("Adafactor mixes the elements", "net.py", "spread"),
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, options, words = COMMANDS[case]
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("{line}", line))
    assert main(["verify", str(path), *options]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in (*words, "  at: ", "  try: ")), told
    assert "Traceback" not in told


def test_memory_limit_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("{line}", "return torch.optim.AdamW(parameters)"))
    options = ["--plan", "dp=2,zero=1", "--memory-limit", "99B", "--cache", str(tmp_path / "cache")]
    assert main(["train", str(path), *options]) == 2
    told = capsys.readouterr().err
    for word in ("99 B are allowed", "optimizer state", "parameters", "gradients", "net.py", "  try: zero=3"):
        assert word in told, told
