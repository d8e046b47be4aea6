"""A parallel module inside another one: its weights go out and in under the original names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh()).square().mean()


class Outer(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(3, 2)


EXAMPLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_weights_inside_another_module(plan: str) -> None:
    body = Body()
    eager, outer = Outer(body), Outer(weft.parallelize(body, EXAMPLE, plan, emulate=True, cache=None))
    saved = outer.state_dict()
    assert list(saved) == list(eager.state_dict())
    for name, value in body.state_dict(prefix="body.").items():
        assert torch.equal(saved[name], value), name
    into: dict[str, Any] = {"there": 1}
    assert list(outer.body.state_dict(destination=into, prefix="x.")) == ["there", *body.state_dict(prefix="x.")]
    other = {name: torch.full_like(value, 3) for name, value in saved.items()}
    assert not any(outer.load_state_dict(other))
    for rank in outer.body.ranks:
        mine = Outer(rank)
        assert set(mine.state_dict()) <= set(saved)
        assert not any(mine.load_state_dict(mine.state_dict()))
        assert all((value == 3).all() for value in rank.state_dict().values())
    assert len(list(outer.body.parameters())) + 2 == len(list(outer.parameters()))
    outer.body.forward_backward(EXAMPLE)


def test_what_does_not_fit_is_told() -> None:
    outer = Outer(weft.parallelize(Body(), EXAMPLE, "tp=2", emulate=True, cache=None))
    state = outer.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"body.up.bias"'):
        outer.load_state_dict({name: value for name, value in state.items() if name != "body.up.bias"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"body.other"'):
        outer.load_state_dict({**state, "body.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"up.bias has shape \[7\], planned as \[8\]"):
        outer.load_state_dict({**state, "body.up.bias": torch.zeros(7)})
    found = outer.load_state_dict({"body.other": torch.zeros(1)}, strict=False)
    assert set(found.missing_keys) == set(state) and found.unexpected_keys == ["body.other"]
