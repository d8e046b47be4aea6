"""As `test_outside_reads.py`, of numbers that equal each other and are not the same to a forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.test_outside_reads import Base, batch, made
from weft.errors import RunError
from weft.runtime.checks.outside import Outside
from weft.runtime.program.reads import Reads

THIS: Any = sys.modules[__name__]
COUNT: Any = 2
ZERO: Any = 0.0
CONFIG = SimpleNamespace(count=2)
TABLE: dict[str, Any] = {"count": 2}
VALUE = ContextVar[Any]("VALUE")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    THIS.COUNT, THIS.ZERO, CONFIG.count, TABLE["count"] = 2, 0.0, 2, 2


class Of(Base):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.read(torch.arange(8))).square().mean()


def sign_of_zero(places: Tensor) -> Tensor:
    # 1 with 0.0, -1 with -0.0
    return torch.where(1 / (torch.ones(8) * ZERO) > 0, 1.0, -1.0) + places


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], object], str]] = {
    "a float for an int": (lambda i: i * 3 // 2 * COUNT % 3, lambda: setattr(THIS, "COUNT", 2.0), "COUNT"),
    "a flag for a number": (lambda i: i + CONFIG.count - 1, lambda: setattr(CONFIG, "count", 2.0), "count"),
    "another zero": (sign_of_zero, lambda: setattr(THIS, "ZERO", -0.0), "ZERO"),
    "in a dict": (lambda i: i * TABLE["count"], lambda: TABLE.update(count=2.0), "TABLE"),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_are_equal_and_of_another_kind(name: str) -> None:
    read, change, words = CASES[name]
    model, parallel = made(lambda: Of(read))
    torch.testing.assert_close(parallel(batch()), model(batch()))
    change()
    with pytest.raises(RunError, match=words):
        parallel(batch())


def test_a_value_of_this_thread_that_is_equal_and_of_another_kind() -> None:
    VALUE.set(1)
    outside = Outside(Reads(globals=((__name__, "VALUE", "here"),)), {})
    assert outside.changed() == ""
    VALUE.set(True)
    assert "VALUE was 1 when the program was made and is True" in outside.changed()
    VALUE.set(int("1"))
    assert outside.changed() == ""


def test_equal_numbers_may_take_each_others_place() -> None:
    """They are noted: the next call does not look closer again."""
    THIS.ZERO = 1000.5
    outside = Outside(Reads(globals=((__name__, "ZERO", "here"),)), {})
    THIS.ZERO = float("1000.5")
    assert not outside.facts.is_same() and outside.changed() == "" and outside.facts.is_same()
    THIS.ZERO = 1001.5
    assert "ZERO was 1000.5 when the program was made and is 1001.5" in outside.changed()
