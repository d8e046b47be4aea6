"""What else a module can do: a parallel one does it, or refuses it; nothing is silently of no effect."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts
from weft.errors import RunError

PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,microbatches=2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh()).square().mean()


def model() -> Net:
    torch.manual_seed(0)
    return Net()


EXAMPLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def parallel(plan: str, module: nn.Module | None = None, *, emulate: bool = True, **options: Any) -> Any:
    return weft.parallelize(module or model(), EXAMPLE, plan, emulate=emulate, cache=None, **options)


def alone(precision: str | None = None) -> Any:
    """One rank that is this process."""
    return parallel("dp=1", emulate=False, precision=precision)


def refused(call: Callable[[], Any], message: str, remedy: str) -> None:
    with pytest.raises(RunError) as raised:
        call()
    assert message in raised.value.message, raised.value
    assert remedy in raised.value.remedy, raised.value
    assert "test_module_calls.py:" in raised.value.place, raised.value


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda module: torch.save(module, io.BytesIO()),
    "inside another": lambda module: copy.deepcopy(nn.Sequential(module)),
    "averaged": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("make", [lambda: parallel("dp=2"), lambda: parallel("pp=2,microbatches=2"), alone])
def test_copies_are_refused(make: Callable[[], Any]) -> None:
    module = make()
    for how in COPIES.values():
        refused(lambda how=how: how(module), "cannot be copied or pickled", "state_dict()")  # type: ignore[misc]
    module.forward_backward(EXAMPLE)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bfloat16()": lambda module: module.bfloat16(),
    "half()": lambda module: module.half(),
    "double()": lambda module: module.double(),
    "to(dtype)": lambda module: module.to(torch.float16),
    "to(device, dtype)": lambda module: module.to("cpu", torch.bfloat16),
    "type()": lambda module: module.type(torch.float64),
    "of what it is part of": lambda module: nn.Sequential(module).half(),
}


@pytest.mark.parametrize("make", [lambda: parallel("dp=2,zero=1", precision="bf16"), alone])
def test_other_dtypes_are_refused(make: Callable[[], Any]) -> None:
    module = make()
    for how in CONVERSIONS.values():
        refused(lambda how=how: how(module), "its program is for float32", "precision='bf16'")  # type: ignore[misc]
        assert {one.dtype for one in module.parameters()} == {torch.float32}
    module.forward_backward(EXAMPLE)


@pytest.mark.parametrize("plan", PLANS)
def test_other_dtypes_of_some_parameters_are_refused(plan: str) -> None:
    module = parallel(plan)
    next(module.parameters()).data = next(module.parameters()).data.double()
    refused(lambda: module.forward_backward(EXAMPLE), "would be in float64", "precision='bf16'")
    next(module.parameters()).data = next(module.parameters()).data.float()
    module.forward_backward(EXAMPLE)


def test_other_devices_are_refused() -> None:
    refused(lambda: parallel("dp=2").to("meta"), "would go from cpu to meta", "device of their rank")


SAME: dict[str, Callable[[Any], Any]] = {
    "float()": lambda module: module.float(),
    "cpu()": lambda module: module.cpu(),
    "to(device)": lambda module: module.to("cpu"),
    "to(dtype)": lambda module: module.to(torch.float32),
    "to(memory format)": lambda module: module.to(memory_format=torch.channels_last),
    "share_memory()": lambda module: module.share_memory(),
    "train()": lambda module: module.train(),
    "eval()": lambda module: module.eval().train(),
    "requires_grad_()": lambda module: module.requires_grad_(True),
}


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "pp=2,microbatches=2"])
def test_what_changes_nothing_is_done(plan: str) -> None:
    module, other = parallel(plan), parallel(plan)
    for how in SAME.values():
        assert how(module) is module
        for one in (module, other):
            one.train_step(EXAMPLE, torch.optim.SGD(one.parameters(), lr=0.1))
    for name, value in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_parameters_stay_in_their_memory() -> None:
    example = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    module = weft.parallelize(Pictures(), example, "dp=2,zero=1", emulate=True, cache=None)
    before = module.state_dict()
    module.to(memory_format=torch.channels_last)
    assert all(one.is_contiguous() for one in module.parameters())
    module._apply(lambda tensor: tensor * 2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name] * 2), name
    loss = module.train_step(example, torch.optim.SGD(module.parameters(), lr=0.1))
    eager = Pictures()
    eager.load_state_dict({name: value * 2 for name, value in before.items()})
    torch.testing.assert_close(loss, eager(example).detach())


@pytest.mark.parametrize(("plan", "precision"), [*((plan, None) for plan in PLANS), ("dp=2", "bf16")])
def test_what_was_frozen_cannot_be_trained_later(plan: str, precision: str | None) -> None:
    frozen = model()
    frozen.up.weight.requires_grad_(False)
    module = parallel(plan, frozen, precision=precision)
    module.forward_backward(EXAMPLE)
    module.requires_grad_(True)
    refused(lambda: module.forward_backward(EXAMPLE), "up.weight was frozen when", "afterwards")
    for name, one in module.named_parameters():
        one.requires_grad_(not name.endswith("up.weight"))
    module.forward_backward(EXAMPLE)


@pytest.mark.parametrize("frozen", ["norm", "norm up", "norm up down"])
@pytest.mark.parametrize(
    "plan", ["dp=2", "pp=2,microbatches=1,stages=down", "pp=2,microbatches=1,stages=down,schedule=zb-h1"]
)
def test_what_is_frozen_later_gets_no_gradient(plan: str, frozen: str) -> None:
    module, eager = parallel(plan), model()
    for one in (module, eager):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(not any(f"{part}." in name for part in frozen.split()))
    if eager.down.weight.requires_grad:
        module.forward_backward(EXAMPLE)
        eager(EXAMPLE).backward()
    elif plan == "dp=2":
        refused(lambda: module.forward_backward(EXAMPLE), "nothing to train", "requires_grad_")
    else:
        module.forward_backward(EXAMPLE)
    wanted = dict(eager.named_parameters())
    for name, parameter in module.named_parameters():
        gradient = wanted[name.split(".", 2)[2]].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.numel():
            torch.testing.assert_close(parts(parameter.grad), gradient)


@pytest.mark.parametrize(("plan", "precision"), [*((plan, None) for plan in PLANS), ("dp=2", "bf16")])
def test_parameters_that_are_replaced_are_refused(plan: str, precision: str | None) -> None:
    module = parallel(plan, precision=precision)
    state = module.state_dict()
    refused(lambda: module.load_state_dict(state, assign=True), "assign=True", "assign=False")
    module.forward_backward(EXAMPLE)
    holder = next(one for one in module.modules() if "weight" in one._parameters)
    holder.weight = nn.Parameter(torch.zeros_like(holder.weight))
    refused(lambda: module.forward_backward(EXAMPLE), "another parameter was put in the place of", "copy_(values)")


@pytest.mark.parametrize(
    ("plan", "precision"), [("dp=2", None), ("dp=2,zero=3", "bf16"), ("pp=2,microbatches=2", None)]
)
def test_hooks_of_submodules_are_refused(plan: str, precision: str | None) -> None:
    module, calls = parallel(plan, precision=precision), list[Any]()
    rank = next(rank for rank in module.ranks if any(name.endswith("up") for name, _ in rank.named_modules()))
    inside = next(one for name, one in rank.named_modules() if name.endswith("up"))
    hear = lambda *args: calls.append(args)  # noqa: E731
    for register in (
        inside.register_forward_hook,
        inside.register_forward_pre_hook,
        inside.register_full_backward_hook,
    ):
        handle = register(hear)
        refused(lambda: module.forward_backward(EXAMPLE), "up has a hook", "edit the program")
        handle.remove()
        module.forward_backward(EXAMPLE)
    assert not calls


@pytest.mark.parametrize("make", [lambda: parallel("dp=2"), alone])
def test_hooks_of_the_module_are_called(make: Callable[[], Any]) -> None:
    module, calls = make(), list[str]()
    module.register_forward_pre_hook(lambda *args: calls.append("before"))
    module.register_forward_hook(lambda *args: calls.append("after"))
    module.forward_backward(EXAMPLE)
    assert calls == ["before", "after"]


def test_hooks_of_a_module_in_pieces_are_called_in_evaluation() -> None:
    module, calls = parallel("pp=2,microbatches=2"), list[str]()
    for one in (module, module.ranks[1]):
        handle = one.register_forward_hook(lambda *args: calls.append("after"))
        refused(lambda: module.forward_backward(EXAMPLE), "a model in pieces has a hook", "train_step()")
        module.eval()(EXAMPLE)
        assert calls.pop() == "after" and not calls
        handle.remove()
        module.train().forward_backward(EXAMPLE)


@pytest.mark.parametrize("plan", ("dp=1", *PLANS))
def test_hooks_after_accumulation_are_refused(plan: str) -> None:
    module = parallel(plan)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in module.parameters()}
    handles = [one.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for one in optimizers]
    refused(lambda: module.forward_backward(EXAMPLE), "register_post_accumulate_grad_hook", "optimizer.step()")
    for one in handles:
        one.remove()
    module.forward_backward(EXAMPLE)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,microbatches=2"])
def test_masters_are_updated_by_hooks_after_accumulation(plan: str) -> None:
    """Their gradients are complete when they come."""
    module, other = (parallel(plan, precision="bf16") for _ in range(2))
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in module.parameters()}
    for one in optimizers:
        one.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    module.forward_backward(EXAMPLE)
    other.train_step(EXAMPLE, torch.optim.SGD(other.parameters(), lr=0.1))
    for name, value in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,microbatches=2"])
def test_names_of_emulated_parameters(plan: str) -> None:
    module, original = parallel(plan), dict(model().named_parameters())
    named = list(module.named_parameters())
    assert [id(one) for _, one in named] == [id(one) for one in module.parameters()]
    for name, _ in (*named, *module.named_buffers()):
        first, rank, own = name.split(".", 2)
        assert first == "ranks" and rank in "01" and (own in original or own.startswith("norm.")), name
    assert {name.split(".", 2)[2] for name, _ in named} == set(original)
    assert {name for name, _ in alone().named_parameters()} == set(original)


@pytest.mark.parametrize("make", [lambda: parallel("dp=2"), lambda: parallel("pp=2,microbatches=2"), alone])
def test_batches_without_values_are_refused(make: Callable[[], Any]) -> None:
    module = make()
    refused(lambda: module.forward_backward(EXAMPLE.to("meta")), "on the meta device", "in the form of the example")
    module.eval()
    refused(lambda: module(EXAMPLE.to("meta")), "on the meta device", "in the form of the example")
    module.train().forward_backward(EXAMPLE)
