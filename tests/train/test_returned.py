"""What a call returns beside tensors: constants as they are, everything else refused with its type and place."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import CaptureError


class Kind(enum.Enum):
    A = 1


class Word(enum.StrEnum):
    A = "a"


class Info:
    def __init__(self, h: Tensor) -> None:
        self.h = h


CONSTANTS: dict[str, Any] = {
    "dtypes": [torch.float32, {"of": (torch.int64, torch.strided, torch.channels_last)}],
    "device": torch.device("cpu"),
    "enums": (Kind.A, Word.A),
    "ranges": (range(1, 7, 2), slice(None, 3), slice(1, 2, 3)),
    "sets": (set(), {1, 2}, frozenset({"b", "a"}), {(1, "x"), (2, None)}),
    "numbers": (1j, b"\x00z", float("inf"), True, None, "word"),
    "keys": {(0, 1): 1, Kind.A: 2, torch.float32: 3},
}
OBJECTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "array": (lambda h: {"a": np.arange(3)}, r"a ndarray at \[1\]\['a'\]"),
    "generator": (lambda h: (one for one in h), r"a generator at \[1\]"),
    "distribution": (lambda h: [torch.distributions.Normal(h, 1.0, validate_args=False)], r"a Normal at \[1\]\[0\]"),
    "object": (Info, r"a Info at \[1\]"),
    "namespace": (lambda h: types.SimpleNamespace(h=h), r"a SimpleNamespace at \[1\]"),
}


class Returning(nn.Module):
    def __init__(self, rest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(6, 4), rest

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return h.square().mean(), self.rest(h)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("what", CONSTANTS)
def test_constants_are_returned_as_they_are(what: str, plan: str) -> None:
    parallel = weft.parallelize(
        Returning(lambda h: CONSTANTS[what]), (torch.ones(4, 6),), plan, emulate=True, cache=None
    )
    found = parallel(torch.ones(4, 6))[1]
    assert type(found) is type(CONSTANTS[what]) and repr(found) == repr(CONSTANTS[what]) and found == CONSTANTS[what]


@pytest.mark.parametrize("what", OBJECTS)
def test_what_may_hold_tensors_is_refused(what: str) -> None:
    make, words = OBJECTS[what]
    parallel = weft.parallelize(Returning(make), (torch.ones(4, 6),), "dp=2", emulate=True, cache=None)
    # what trains the loss alone needs no more
    parallel.train_step((torch.ones(4, 6),), torch.optim.SGD(parallel.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=rf"returns {words}(.|\n)*dataclasses"):
        parallel(torch.ones(4, 6))
