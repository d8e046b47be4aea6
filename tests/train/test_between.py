"""Weights that are changed between forward and backward: as in eager, which reads what is there, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.parts import parts
from tests.train.ranks import on_ranks
from tests.train.test_interrupted import batch, net
from weft.errors import RunError, WeftError

PLANS = ["dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,recompute=down"]
REFUSED = "was changed in place after the forward"


def by_data(one: Tensor) -> None:
    one.data.mul_(0.9)


@torch.no_grad()
def in_place(one: Tensor) -> None:
    one.mul_(0.9)


def gradients(module: Any, edit: Callable[[Tensor], None], name: str) -> dict[str, Tensor]:
    module(batch()).backward()
    module.zero_grad()
    loss = module(batch())
    for each, one in module.named_parameters():
        if each == name:
            edit(one)
    loss.backward()
    return {each: one.grad.clone() for each, one in module.named_parameters()}


@pytest.mark.parametrize("name", ["down.weight", "norm.weight"])
@pytest.mark.parametrize("plan", PLANS)
def test_through_data(plan: str, name: str) -> None:
    expected = gradients(net(), by_data, name)

    def body(module: Any) -> bool:
        try:
            found = gradients(module, by_data, name)
        except WeftError as error:
            assert REFUSED in str(error)
            # and the next step is right
            module.zero_grad()
            module(batch()).backward()
            return True
        for each, gradient in found.items():
            part = expected[each][tuple(slice(*runs[0]) for runs in module.stored[each])]
            torch.testing.assert_close(parts(gradient), part, rtol=1e-11, atol=1e-12)
        return False

    refused = on_ranks(net(), (batch(),), plan, body)
    assert len(set(refused)) == 1 and refused[0] == any(word in plan for word in ("zero=1", "zero=2", "recompute"))


@pytest.mark.parametrize("plan", PLANS)
def test_in_place(plan: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(net(), in_place, "down.weight")

    def body(module: Any) -> None:
        with pytest.raises(Exception, match=f"modified by an inplace operation|{REFUSED}"):
            gradients(module, in_place, "down.weight")

    on_ranks(net(), (batch(),), plan, body)


def test_a_weight_that_one_rank_holds() -> None:
    """The other has seen nothing, and hears of it."""
    with pytest.raises(WeftError):
        on_ranks(net(), (batch(),), "dp=2,spread", lambda module: gradients(module, by_data, "down.weight"))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "dp=2,recompute=down"])
def test_hooks_of_saved_tensors(plan: str) -> None:
    """Those that change values are followed or refused; others, and checkpoints around the module, are let be."""

    def body(parallel: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda one: one.clone(), lambda one: one), torch.autograd.graph.save_on_cpu():
            parallel(batch()).backward()
        with hooks(lambda one: one, lambda one: one * 2 if one.is_floating_point() else one):
            if plan in ("dp=2", "dp=2,zero=2"):
                parallel(batch())
            else:
                with pytest.raises(RunError, match="saved_tensors_hooks change what"):
                    parallel(batch())

    on_ranks(net(), (batch(),), plan, body)
    with (
        pytest.raises(RunError, match="saved_tensors_hooks change what"),
        torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one * 2),
    ):
        weft.parallelize(net(), (batch(),), plan, emulate=True, cache=None)(batch())
