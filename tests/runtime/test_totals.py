"""Gradients over several backwards, added up by the products that make them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.test_deferred import NUM_RANKS, PARTS, Mixed, gradients, mixed
from tests.runtime.test_gathered import batch
from tests.runtime.test_mail import Starting
from weft.runtime.emulator import run_ranks
from weft.runtime.totals import Later, add_now, adding
from weft.runtime.transport import Transport

SCALES = (1.0, 2.0, -0.5)


def plainly(module: Mixed, x: Tensor, *, recompute: bool) -> dict[str, Tensor]:
    """What autograd gives for the same batches, one after the other."""
    for scale in SCALES:
        module(x * scale, recompute).backward()
    found = gradients(module)
    module.zero_grad()
    return found


def added(module: Mixed, x: Tensor, *, recompute: bool, later: Later | None) -> dict[str, Tensor]:
    module.hold_gradients(nullcontext())
    for scale in SCALES:
        with adding(module, later):
            loss = module(x * scale, recompute)
        module.rerun_mode = adding(module, later)
        loss.backward()
        if later is not None:
            assert later
            assert scale != SCALES[0] or "a.weight" not in module.sinks
            add_now(module, later)
            assert not later
    module.complete_gradients()
    return gradients(module)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_sum_is_autograds(recompute: bool, waits: bool) -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        plain = plainly(module, x, recompute=recompute)
        found = added(module, x, recompute=recompute, later=Later() if waits else None)
        assert plain.keys() == found.keys() == PARTS.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-13, atol=1e-14)

    run_ranks(NUM_RANKS, body)


def test_sums_stay_where_they_are() -> None:
    """No second tensor per weight and backward."""

    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        module.hold_gradients(nullcontext())
        places = set()
        for scale in SCALES:
            with adding(module):
                module(x * scale).backward()
            total = module.sinks["a.weight"].total
            assert total is not None
            places.add(total.data_ptr())
        assert len(places) == 1

    run_ranks(NUM_RANKS, body)


def test_a_hook_of_the_users_is_called() -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        plain, calls = plainly(module, x, recompute=False), []
        handle = module.a.weight.register_hook(lambda gradient: calls.append(gradient.shape))
        found = added(module, x, recompute=False, later=None)
        handle.remove()
        assert len(calls) == len(SCALES)
        torch.testing.assert_close(found["a.weight"], plain["a.weight"], rtol=1e-13, atol=1e-14)

    run_ranks(NUM_RANKS, body)


def test_a_weight_of_several_products_is_summed_once() -> None:
    """They arrive one by one, in every step: a sum that starts after the first would have to be followed by another."""

    def body(transport: Transport) -> None:
        starting: Any = Starting(transport)
        module, x = mixed(starting), batch().chunk(NUM_RANKS)[transport.rank]
        plain = mixed(transport)
        for _ in range(3):
            module(x).backward()
            plain(x).backward()
            assert len(starting.sums) == module.grad_sync.num_buckets
            starting.sums.clear()
            found, expected = gradients(module), gradients(plain)
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
            module.zero_grad()
            plain.zero_grad()

    run_ranks(NUM_RANKS, body)
