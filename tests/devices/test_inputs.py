"""Inputs on their way to the rank's device: of those that are only cut, the rank's rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import MLP
from weft.compile import compile_program
from weft.runtime.layout.inputs import brought, moved, sliced_inputs
from weft.runtime.links.fake_transport import FakeTransport
from weft.runtime.program.files import files_of
from weft.runtime.program.load import load_program

META = torch.device("meta")


class Forwards:
    """As they are generated, and as a user may have edited them."""

    comm: Any

    def cut(self, idx: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        idx = self.comm.slice(idx, 0, over="dp")
        found = idx + mask
        targets = self.comm.slice(targets, 0, over="dp")
        return found + targets

    def read_before(self, idx: Tensor, targets: Tensor) -> Tensor:
        found = idx + 1
        idx = self.comm.slice(idx, 0, over="dp")
        other = self.comm.slice(targets, 0, over="dp")
        return found + idx + other + targets

    def in_a_function(self, idx: Tensor) -> Tensor:
        def later() -> Tensor:
            return idx + 1

        idx = self.comm.slice(idx, 0, over="dp")
        return later()


def test_what_a_forward_cuts_first() -> None:
    assert sliced_inputs(Forwards.cut) == {0, 2}
    assert sliced_inputs(Forwards.read_before) == set()
    assert sliced_inputs(Forwards.in_a_function) == set()


def test_what_lies_there_is_used_as_it_is() -> None:
    inputs = (torch.zeros(3), torch.zeros(2), torch.zeros(1))
    assert brought(inputs, torch.device("cpu"), Forwards.cut) is inputs
    there = torch.zeros(3, device=META)
    assert moved(there, META) is there


@pytest.mark.parametrize(("plan", "rows"), [("dp=2", [2, 2]), ("tp=2", [4, 4]), ("dp=2,zero=3", [2, 2])])
def test_a_rank_moves_what_it_reads(monkeypatch: pytest.MonkeyPatch, plan: str, rows: list[int]) -> None:
    """A rank on the meta device, fed from the host: what goes there, and how."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = torch.zeros(4, 6), torch.zeros(4, 6)
    files = files_of(compile_program(MLP(), batch, plan).files)
    module = load_program(files, FakeTransport(0, 2, META))
    with torch.no_grad():
        loss = module(*batch)
    assert loss.device == META and [len(one) for one in pinned] == rows


def test_an_input_with_a_gradient_stays_in_the_graph() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert moved(x, META).requires_grad
