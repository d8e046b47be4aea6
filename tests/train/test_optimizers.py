"""Optimizers over a parallel module: they do what they do on one device, or are refused."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.train.eager import mlp
from tests.train.ranks import on_ranks
from weft.errors import RunError
from weft.runtime.random import Stream
from weft.runtime.training.step import call
from weft.verify.draw_mode import DrawMode

STEPS = 3
Make = Callable[[nn.Module], Any]


def parallel_of(model: nn.Module, example: Any, plan: str) -> Any:
    return weft.parallelize(copy.deepcopy(model), example, plan, emulate=True, cache=None)


def train(module: Any, example: Any, optimizers: list[Any], bound: float = math.inf, schedulers: Any = ()) -> None:
    """As a user does it, on any module."""
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad()
        if isinstance(module, weft.train.emulated.Emulated):
            module.forward_backward(example)
        else:
            with DrawMode(Stream(0, step, 0)):
                loss = call(module, example)
            loss.backward()
        if bound < math.inf:
            weft.clip_grad_norm_(module, bound)
        for one in (*optimizers, *schedulers):
            one.step()


def assert_alike(parallel: nn.Module, model: nn.Module) -> None:
    found = parallel.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: name + text)


def by_dims(kind: Any, **settings: Any) -> Make:
    """No decay on what has one dim."""

    def make(module: nn.Module) -> Any:
        matrices = [one for one in module.parameters() if one.ndim > 1]
        rest = [one for one in module.parameters() if one.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
        return [kind(groups, lr=1e-2, eps=1e-3, **settings)]

    return make


def by_name(module: nn.Module) -> list[Any]:
    plain = [one for name, one in module.named_parameters() if not name.endswith("bias")]
    bare = [one for name, one in module.named_parameters() if name.endswith("bias")]
    return [torch.optim.SGD([{"params": plain, "weight_decay": 0.2}, {"params": bare}], lr=0.05, momentum=0.9)]


def muon(module: nn.Module) -> list[Any]:
    matrices = [one for one in module.parameters() if one.ndim == 2]
    rest = [one for one in module.parameters() if one.ndim != 2]
    return [Orthogonal(matrices), torch.optim.AdamW(rest, lr=1e-2, eps=1e-3)]


class Orthogonal(torch.optim.Optimizer):
    """Like Muon, in the precision of its parameters. Counts what it updates."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    x = one.grad / (one.grad.norm() + 1e-7)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    one.add_(x, alpha=-group["lr"])
                    self.state[one]["updates"] = self.state[one].get("updates", 0) + 1


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (by_dims(torch.optim.AdamW), "dp=2,zero=3"),
        (by_dims(torch.optim.AdamW, foreach=True), "dp=2,tp=2"),
        (by_dims(torch.optim.AdamW, fused=True), "tp=2"),
        (by_name, "dp=2,zero=3"),
        (muon, "dp=2,tp=2,spread=matrices"),
        (muon, "dp=2,zero=3,spread=matrices"),
        (lambda module: [torch.optim.Adafactor(module.parameters(), lr=1e-2)], "dp=2,tp=2,spread"),
        (lambda module: [torch.optim.Adafactor(module.parameters(), lr=1e-2)], "pp=2,dp=2,spread"),
    ],
    ids=["groups zero", "foreach", "fused", "by name", "muon tp", "muon zero", "adafactor tp", "adafactor pp"],
)
def test_it_updates_as_on_one_device(make: Make, plan: str) -> None:
    model, example = mlp()
    model.drop.p = 0.0 if "pp" in plan else 0.1  # micro-batches draw other numbers
    parallel = parallel_of(model, example, plan)
    bound = 0.05 if "zero" in plan else math.inf
    train(parallel, example, make(parallel), bound)
    train(model, example, make(model), bound)
    assert_alike(parallel, model)


def test_a_schedule_of_rates_works_as_it_is() -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2,zero=3")
    for module in (parallel, model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-3)
        # starts at a rate of 0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        train(module, example, [optimizer], schedulers=[schedule])
    assert_alike(parallel, model)


@pytest.mark.parametrize("plan", ["dp=2,spread", "dp=2,tp=2,spread", "dp=2,zero=3,spread=matrices"])
def test_each_matrix_is_updated_on_one_rank(plan: str) -> None:
    model, example = mlp()

    def body(module: Any) -> dict[str, int]:
        first, second = muon(module)
        names = {id(one): name for name, one in module.named_parameters()}
        for _ in range(STEPS):
            module.train_step(example, [first, second])
        return {names[id(one)]: told["updates"] for one, told in first.state.items()}

    told = on_ranks(model, example, plan, body)
    matrices = {name for name, one in model.named_parameters() if one.ndim == 2}
    found = [name for rank in told for name in rank]
    assert sorted(found) == sorted(matrices) and all(set(rank.values()) <= {STEPS} for rank in told)


def test_a_rank_that_holds_no_matrix_lists_empty_ones() -> None:
    model, example = mlp()

    def body(module: Any) -> tuple[int, int]:
        held = [one for one in module.parameters() if one.ndim == 2]
        torch.optim.Muon(held)
        return len(held), sum(one.numel() for one in held)

    told = on_ranks(model, example, "dp=4,spread", body)
    assert all(count == 2 for count, _ in told) and sum(size > 0 for _, size in told) == 2


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", "pp=2,tp=2"])
def test_mixing_elements_of_parts_is_refused(plan: str) -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, plan)
    optimizer = torch.optim.Adafactor(parallel.parameters())
    with pytest.raises(RunError, match=r"mixes the elements.*up.weight.* only(.|\n)*spread"):
        parallel.train_step(example, optimizer)


def test_it_is_allowed_on_what_is_whole_and_tried_once() -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2,zero=3,spread=matrices")
    with pytest.raises(RunError, match=r"Adafactor mixes the elements.*bias"):
        parallel.train_step(example, torch.optim.Adafactor(parallel.parameters()))
    optimizers = muon(parallel)
    for _ in range(2):
        parallel.train_step(example, optimizers)
    # of Adafactor one, of AdamW one; matrices lie whole, but a rank lacks some: that they are not mixed was tried too
    assert len(parallel.guard.verdicts) == 3


def test_mixing_parameters_is_refused_where_ranks_hold_different_ones() -> None:
    class Global(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.1)
            return super().step(closure)

    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2,spread")
    with pytest.raises(RunError, match="Global mixes the parameters"):
        parallel.train_step(example, Global(parallel.parameters(), lr=0.1))


def test_an_optimizer_of_before_is_refused() -> None:
    model, example = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = weft.parallelize(model, example, "dp=2", emulate=True, cache=None)
    with pytest.raises(RunError, match=r"given to parallelize(.|\n)*afterwards"):
        parallel.train_step(example, optimizer)
    parallel.forward_backward(example)
    with pytest.raises(RunError, match="given to parallelize"):
        optimizer.step()
    # whoever goes on with the original knows what it does
    call(model, example).backward()
    optimizer.step()


def test_an_optimizer_of_nothing_or_not_all_is_refused() -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2")
    with pytest.raises(RunError, match="holds no parameter"):
        parallel.train_step(example, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    some = [one for name, one in parallel.named_parameters() if "bias" not in name]
    with pytest.raises(RunError, match=r"does not hold up.bias(.|\n)*requires_grad_"):
        parallel.train_step(example, torch.optim.SGD(some))
    for name, one in parallel.named_parameters():
        one.requires_grad_("bias" not in name)
    parallel.train_step(example, torch.optim.SGD(some))


def trained_by_closures(module: Any, example: Any) -> Any:
    """As frameworks train: the optimizer is given what runs the model."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with DrawMode(Stream(0, step, 0)) if type(module) is type(mlp()[0]) else contextlib.nullcontext():
            loss = call(module, example)
        loss.backward()
        return loss

    losses = []
    for step in range(STEPS):
        losses.append(optimizer.step(closure) if step else optimizer.step(closure=closure))
        schedule.step()
    return losses


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_a_closure_runs_before_the_update(plan: str) -> None:
    model, example = mlp()
    found = on_ranks(copy.deepcopy(model), example, plan, lambda module: trained_by_closures(module, example))
    parallel = parallel_of(model, example, plan)
    emulated, losses = trained_by_closures(parallel, example), trained_by_closures(model, example)
    for each in (*found, emulated):
        torch.testing.assert_close(torch.stack(each), torch.stack(losses), rtol=1e-12, atol=1e-12)
    assert_alike(parallel, model)


class Sharp(torch.optim.SGD):
    """Runs the model where it likes."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharp])
def test_a_model_inside_the_update_is_refused_on_several_ranks(kind: Any) -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2")
    with pytest.raises(RunError, match=rf"{kind.__name__} runs the model inside its update(.|\n)*AdamW"):
        kind(parallel.parameters(), lr=0.1).step(lambda: parallel.forward_backward(example))
    alone = parallel_of(model, example, "dp=1")
    kind(alone.parameters(), lr=0.1).step(lambda: alone.forward_backward(example))


@pytest.mark.parametrize("plan", ["tp=2", "dp=2"])
def test_clipping_the_emulated_parameters_by_torch_is_refused(plan: str) -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, plan)
    parallel.forward_backward(example)
    with pytest.raises(RunError, match=r"clip_grad_norm_(.|\n)*weft.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)


Warned = list[warnings.WarningMessage]


def clipping(as_list: bool, clip: Callable[[Any], Any], example: Any) -> Callable[[Any], Any]:
    def body(module: Any) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.forward_backward(example)
        clip(list(module.parameters()) if as_list else module.parameters())
        optimizer.step()

    return body


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings of all ranks: they are threads, and what catches warnings is one for all threads."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", "pp=2,microbatches=2,stages=down"])
@pytest.mark.parametrize("as_list", [False, True], ids=["parameters()", "list"])
def test_clipping_what_a_rank_holds_by_torch_is_refused(plan: str, as_list: bool, told: Warned) -> None:
    model, example = mlp()
    body = clipping(as_list, lambda held: torch.nn.utils.clip_grad_norm_(held, 1e-3), example)
    listed = r"needs more of(.|\n)*weft\.clip_grad_norm_\(parallel"
    with pytest.raises(RunError, match=listed if as_list else "takes the norm of what one rank holds"):
        on_ranks(model, example, plan, body)


def test_what_all_ranks_do_alike_is_allowed(told: Warned) -> None:
    model, example = mlp()

    def halve(held: Any) -> None:
        for one in held:
            one.grad.mul_(0.5)

    clamp = lambda held: torch.nn.utils.clip_grad_value_(held, 1e-3)  # noqa: E731
    for plan, clip in (("tp=2", halve), ("tp=2", clamp)):
        on_ranks(model, example, plan, clipping(True, clip, example))
    # every rank holds everything whole
    on_ranks(model, example, "dp=2", clipping(False, lambda held: torch.nn.utils.clip_grad_norm_(held, 1e-3), example))


def test_what_is_written_and_stays_the_same_is_warned_of(told: Warned) -> None:
    model, example = mlp()
    body = clipping(True, lambda held: [one.grad.mul_(1.0) for one in held], example)
    on_ranks(model, example, "pp=2,microbatches=2,stages=down", body)
    assert any("clip_grad_norm_" in str(one.message) for one in told)


def test_a_rank_that_holds_nothing_is_not_waited_for(told: Warned) -> None:
    model, example = mlp()
    body = clipping(True, lambda held: [one.grad.mul_(0.5) for one in held], example)
    # the second stage has no parameters
    on_ranks(model, example, "pp=2,microbatches=2,stages=drop", body)


# --- loss scaling -----------------------------------------------------------------------------------------------


def test_torchs_scaler_is_refused_and_ours_agrees_on_all_ranks() -> None:
    model, example = mlp()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}

    def plain(module: Any) -> None:
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(module(**example)).backward()
        scaler.step(optimizer)

    with pytest.raises(RunError, match=r"GradScaler(.|\n)*weft.GradScaler"):
        on_ranks(model, example, "tp=2", plain)

    def ours(module: Any) -> tuple[bool, float]:
        scaler, optimizer = weft.GradScaler("cpu"), torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(module(**example)).backward()
        if module.program.transport.rank == 1:
            module.up.weight.grad.as_subclass(torch.Tensor)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        moved = any(bool((one != before[name]).any()) for name, one in module.named_parameters() if "down.b" in name)
        return moved, scaler.get_scale()

    assert on_ranks(model, example, "tp=2", ours) == [(False, 2.0**15)] * 2


def test_our_scaler_trains_as_without_it() -> None:
    model, example = mlp()

    def body(module: Any) -> list[float]:
        scaler, optimizer = weft.GradScaler("cpu"), torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = module(**example)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            weft.clip_grad_norm_(module, 0.05)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    found = on_ranks(model, example, "tp=2", body)[0]
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        optimizer.zero_grad()
        with DrawMode(Stream(0, step, 0)):
            loss = call(model, example)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        wanted.append(loss.item())
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_scale_that_overflows_for_ever_is_an_error() -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "tp=2")
    scaler, optimizer = weft.GradScaler("cpu"), torch.optim.SGD(parallel.parameters(), lr=0.1)
    held = list(parallel.parameters())
    with pytest.raises(RunError, match="not finite in 64 steps"):
        for _ in range(70):
            for one in held:
                one.grad = torch.full_like(one, math.inf)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()


def test_marks_are_not_saved() -> None:
    model, example = mlp()
    parallel = parallel_of(model, example, "dp=2")
    again = pickle.loads(pickle.dumps(list(parallel.parameters())))
    torch.optim.SGD(again, lr=0.1).step(lambda: 0.0)


def test_an_optimizer_of_what_shares_a_parameter_outside_is_refused() -> None:
    model, example = mlp()
    head = nn.Linear(8, 8, bias=False)
    head.weight = next(model.parameters())
    parallel = weft.parallelize(model, example, "dp=2", emulate=True, cache=None)
    optimizer = torch.optim.SGD([*parallel.parameters(), *head.parameters()], lr=0.1)
    parallel.forward_backward(example)
    optimizer.step()
    # only now it is trained beside the parallel module's
    head.weight.grad = torch.ones_like(head.weight)
    with pytest.raises(RunError, match=r"given to parallelize\(\), beside(.|\n)*all that shares it"):
        optimizer.step()
