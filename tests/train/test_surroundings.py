"""What stands around the call of a parallel module and would change its numbers is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.train.eager import mlp
from weft.errors import WeftError

PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")


def parallel(plan: str, **options: object) -> torch.nn.Module:
    model, example = mlp()
    return weft.parallelize(model, example, plan=plan, emulate=True, cache=None, **options)


def step(module: torch.nn.Module) -> None:
    module.train_step(mlp()[1], torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize("plan", PLANS)
def test_gradient_hooks_are_refused(plan: str) -> None:
    module = parallel(plan)
    step(module)
    handle = next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(WeftError, match="gradient hook"):
        step(module)
    handle.remove()


def test_gradient_hooks_on_masters_are_refused() -> None:
    module = parallel("dp=1", precision="bf16")
    next(module.parameters()).register_hook(lambda gradient: gradient * 2)
    with pytest.raises(WeftError, match="gradient hook"):
        step(module)


def test_gradient_hooks_on_one_device_are_called() -> None:
    module, calls = parallel("dp=1"), []
    next(module.parameters()).register_hook(lambda gradient: calls.append(gradient.shape))
    step(module)
    assert len(calls) == 1


@pytest.mark.parametrize("plan", ("dp=1", "dp=2", "pp=2,microbatches=2"))
def test_autocast_around_the_call_is_refused(plan: str) -> None:
    module = parallel(plan)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(WeftError, match="under autocast"):
        step(module)


def test_autocast_around_everything_is_part_of_the_program() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(parallel("dp=2"))


@pytest.mark.parametrize("given", [None, "adamw", torch.optim.SGD])
def test_what_is_no_optimizer_is_refused(given: object) -> None:
    with pytest.raises(WeftError, match="is no optimizer"):
        parallel("dp=2").train_step(mlp()[1], given)


def test_lbfgs_is_refused_in_a_step() -> None:
    module = parallel("dp=1")
    with pytest.raises(WeftError, match="LBFGS"):
        module.train_step(mlp()[1], torch.optim.LBFGS(module.parameters()))


def test_clipping_wants_a_module() -> None:
    with pytest.raises(WeftError, match="not a module"):
        weft.clip_grad_norm_(parallel("dp=2").train_step, 1.0)  # type: ignore[arg-type]


def test_a_function_for_values_of_a_function_is_refused() -> None:
    model, example = mlp()
    with pytest.raises(WeftError, match="so is the model"):
        weft.parallelize(lambda: model, example, plan="dp=2", emulate=True, cache=None, init=lambda module: None)


class Doubles(TorchFunctionMode):
    """What comes out of a product is doubled."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.nn.functional.linear else found


class Hears(TorchDispatchMode):
    """Threads that multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.products = set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(function):
            self.products.add(threading.current_thread().name)
        return function(*args, **(kwargs or {}))


def test_ranks_work_under_modes_of_the_caller() -> None:
    model, batch = mlp()
    model.drop.p = 0.0
    module = weft.parallelize(model, batch, plan="dp=2", emulate=True, cache=None)
    with Doubles():
        found, expected = module(**batch), model(**batch)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    wanted = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name.split(".", 2)[2]].grad)
    with Hears() as mode:
        module(**batch).backward()
    assert mode.products == {"rank 0", "rank 1"}
    torch.testing.assert_close(module(**batch), model(**batch))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_transforms_around_the_call_are_refused(plan: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    x = torch.ones(4, 4)
    module = weft.parallelize(model, (x,), plan, emulate=True, cache=None)

    def forward_mode() -> None:
        with torch.autograd.forward_ad.dual_level():
            module(torch.autograd.forward_ad.make_dual(x, x))

    for transform in (
        lambda: torch.func.jvp(module, (x,), (x,)),
        lambda: torch.func.vjp(module, x),
        lambda: torch.func.grad(lambda one: module(one).sum())(x),
        lambda: torch.func.vmap(module)(x.expand(2, 4, 4)),
        forward_mode,
    ):
        with pytest.raises(WeftError, match=r"inside a transform of torch\.func"):
            transform()
    assert module(x).shape == (4, 4)
