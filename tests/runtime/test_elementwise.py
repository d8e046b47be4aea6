"""Optimizers tried on small parameters: what they mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weft.runtime.checks.elementwise import mixing, mixing_of, settings_of
from weft.runtime.checks.scales import Scales, agreed


def of(kind: Any, **settings: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.zeros(3, 3))], **settings)
    return made


@pytest.mark.parametrize(
    "optimizer",
    [
        of(torch.optim.AdamW, foreach=True),
        of(torch.optim.AdamW, fused=True, amsgrad=True),
        of(torch.optim.SGD, lr=0.0, momentum=0.9),
        of(torch.optim.SGD, lr=torch.tensor(0.1), weight_decay=0.1, nesterov=True, momentum=0.5),
        of(torch.optim.Adagrad),
        of(torch.optim.RMSprop, centered=True),
    ],
    ids=["foreach", "fused", "rate 0", "nesterov", "Adagrad", "RMSprop"],
)
def test_elementwise_ones_mix_nothing(optimizer: torch.optim.Optimizer) -> None:
    num_states = len(optimizer.state)
    found = mixing_of(optimizer, optimizer.param_groups[0], {1, 2, 3, 4})
    assert found.known and not found.elements and not found.parameters
    # it was not changed by being tried
    assert len(optimizer.state) == num_states and optimizer.param_groups[0]["params"][0].eq(0).all()


def test_a_rate_of_0_for_the_time_being_hides_nothing() -> None:
    optimizer = of(torch.optim.Adafactor, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0
    assert mixing_of(optimizer, optimizer.param_groups[0], {1, 2}).elements == {1, 2}


def test_muon_mixes_matrices_and_is_not_asked_about_vectors() -> None:
    optimizer = of(torch.optim.Muon)
    assert mixing_of(optimizer, optimizer.param_groups[0], {2}).elements == {2}
    assert not mixing_of(optimizer, optimizer.param_groups[0], {1}).elements


class Own(torch.optim.Optimizer):
    """A user's: matrices by their norm, the rest by element; the setting is an attribute."""

    def __init__(self, parameters: Any, power: float = 0.0) -> None:
        self.power = power
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                scale = one.grad.norm() ** self.power if one.ndim == 2 else 1.0
                one.sub_(one.grad, alpha=group["lr"] * float(scale))


def test_settings_that_are_attributes_count() -> None:
    for power, mixed in ((0.0, set()), (-1.0, {2})):
        optimizer = of(Own, power=power)
        assert mixing_of(optimizer, optimizer.param_groups[0], {1, 2}).elements == mixed


def test_what_holds_another_optimizer_does_not_move_it() -> None:
    class Around(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float = 0.1) -> None:
            held = list(parameters)
            super().__init__(held, lr=lr)
            self.inner = torch.optim.SGD([one for group in self.param_groups for one in group["params"]], lr=lr)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    optimizer = of(Around)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 3)
    found = mixing_of(optimizer, optimizer.param_groups[0], {2})
    assert found.known and not found.elements
    assert optimizer.param_groups[0]["params"][0].eq(0).all()


def test_what_cannot_be_tried_is_told_so() -> None:
    optimizer = of(torch.optim.LBFGS)
    assert not mixing_of(optimizer, optimizer.param_groups[0], {2}).known


def test_a_norm_over_all_parameters_mixes_parameters() -> None:
    class Global(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
            return super().step(closure)

    assert mixing(lambda held: Global(held, lr=0.1), {1}).parameters
    assert not mixing(torch.optim.AdamW, {1}).parameters


def test_numbers_that_change_from_step_to_step_ask_no_new_question() -> None:
    first, second, third = (of(torch.optim.AdamW, lr=lr, weight_decay=wd) for lr, wd in ((1, 0.1), (2, 0.2), (2, 0.0)))
    told = [settings_of(one, one.param_groups[0]) for one in (first, second, third)]
    assert told[0] == told[1] != told[2]


def test_factors_are_found_and_compared() -> None:
    held = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    for one in held:
        one.grad = torch.arange(one.numel(), dtype=torch.float32).view(one.shape)
    scales = Scales(held)
    scales.remember()
    assert not scales.written
    torch.nn.utils.clip_grad_norm_(held, 1.0)
    norm = (sum(i * i for i in range(12)) + sum(i * i for i in range(5))) ** 0.5
    assert scales.written and scales.factor() == pytest.approx(1 / norm, rel=1e-5)
    scales.remember()
    torch.nn.utils.clip_grad_value_(held, 1e-3)
    assert scales.written and scales.factor() != scales.factor()  # nan: no factor explains it
    scales.remember()
    held[0].grad = held[0].grad * 2
    assert scales.written
    assert agreed([1.0, 1.0 + 1e-9, float("nan")], 1e-7) and not agreed([1.0, 1.1], 1e-7)
