"""As `test_outside_reads.py`, of what forward reads through a holder: modules that the model does not own,
objects of libraries, closures, functions and their code."""

from __future__ import annotations

import contextvars
import copy
import sys
import threading
import weakref
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weft
from tests.captures import CAPTURES
from tests.train.test_outside_reads import CONFIG, DICT, LIST, TENSOR, Base, GlobalTensor, batch, made, setting
from weft.errors import RunError
from weft.runtime.checks.outside import Outside
from weft.runtime.program.reads import Reads

THIS: Any = sys.modules[__name__]


class Teacher(Base):
    """Reads a module that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"teacher": nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)}
        self.unused = [nn.Linear(4, 4)]

    def factor(self) -> Any:
        return self.held["teacher"](torch.ones(4, dtype=torch.float64)) * len(self.unused)


class HeldIn(Base):
    """Reads a value in an object of a library."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def factor(self) -> Any:
        return self.read(self.held)


THREAD = threading.local()
THREAD.scale = 2.0
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=2.0)


class Of(Base):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def factor(self) -> Any:
        return self.read()


class Calls(Base):
    def act(self) -> float:
        return act() * 1.0

    def factor(self) -> Any:
        return self.act()


def act() -> float:
    return 2.0


def other_act(*_: Any) -> float:
    return 3.0


def set_code(*_: Any) -> None:
    act.__code__ = (lambda: 3.0).__code__


def first(held: Any) -> Any:
    return held[0]


def keyed(held: Any) -> Any:
    return held["scale"]


def called(held: Any) -> Any:
    return held()


def get_first(held: list[float]) -> Callable[[], float]:
    return lambda: held[0]


class OverClosure:
    def __init__(self, held: list[float]) -> None:
        self.get = get_first(held)


def through_property(held: list[float]) -> Any:
    class Owner:
        @property
        def scale(self) -> float:
            return held[0]

    return Owner()


def scale_of(held: Any) -> Any:
    return held.scale


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    functions, code, held = (act, Calls.act, Calls.factor), act.__code__, copy.deepcopy(DICT)
    with CAPTURES.sleep():
        yield
    THIS.act, Calls.act, Calls.factor = functions  # type: ignore[method-assign]
    functions[0].__code__ = code
    DICT.update(held)
    LIST[:] = [2.0]
    CONFIG.scale = 2.0
    TENSOR.fill_(2.0)
    CONTEXT.set(2.0)
    THREAD.scale = OPTIMIZER.param_groups[0]["lr"] = 2.0


def put(key: Any, value: Any = 3.0) -> Callable[[Any, Any], None]:
    return lambda model, parallel: model.held.__setitem__(key, value)


def teacher(model: Any) -> Any:
    return model.held["teacher"]


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], str]] = {
    "a module that is held": (
        Teacher,
        lambda model, _: teacher(model).weight.add_(1.0),
        "teacher'].weight was changed",
    ),
    "its .data": (Teacher, lambda model, _: teacher(model).bias.data.add_(1.0), "teacher'].bias was changed in place"),
    "its memory": (Teacher, lambda model, _: setattr(teacher(model).bias, "data", torch.ones(4)), "other memory"),
    "its state": (
        Teacher,
        lambda model, _: teacher(model).load_state_dict(teacher(Teacher()).state_dict()),
        "weight was",
    ),
    "its parameter": (Teacher, lambda model, _: setattr(teacher(model), "bias", None), r"teacher'].bias was a tensor"),
    "tensor's .data": (GlobalTensor, lambda *_: TENSOR.data.mul_(2.0), "TENSOR was changed in place"),
    "a function": (Calls, setting(THIS, "act", other_act), "act was .*function act .* is .*other_act"),
    "its code": (Calls, set_code, "the code of act is another one"),
    "a method": (Calls, setting(Calls, "act", other_act), "Calls.act was .* is .*other_act"),
    "a method of one": (Calls, lambda model, _: setattr(model, "act", other_act), "act was set to .*other_act"),
    "forward": (Calls, setting(Calls, "factor", other_act), "Calls.factor was"),
    "array": (lambda: HeldIn(array("d", [2.0]), first), put(0), r"held was array\('d', \[2.0\]\)"),
    "bytearray": (lambda: HeldIn(bytearray([2]), first), put(0, 3), "held was bytearray"),
    "numpy": (lambda: HeldIn(numpy.full(2, 2.0), lambda held: float(held[0])), put(0), r"held was array\(\[2., 2.\]\)"),
    "more of numpy": (lambda: HeldIn(numpy.full(999, 2.0), lambda held: float(held[0])), put(0), "held was array"),
    "ChainMap": (lambda: HeldIn(ChainMap({}, {"scale": 2.0}), keyed), lambda m, _: m.held.maps[1].clear(), "held.maps"),
    "UserDict": (lambda: HeldIn(UserDict(scale=2.0), keyed), put("scale"), "held.data was {'scale': 2.0}"),
    "proxy": (
        lambda: HeldIn(MappingProxyType(DICT), keyed),
        lambda *_: DICT.update(scale=3.0),
        "held was mappingproxy",
    ),
    "partial": (
        lambda: HeldIn(partial(max, [2.0, 1.0]), called),
        lambda model, _: model.held.args[0].append(3.0),
        r"held.args\[0\] was \[2.0, 1.0\]",
    ),
    "weak": (
        lambda: HeldIn(weakref.ref(CONFIG), lambda held: held().scale),
        setting(CONFIG, "scale", 3.0),
        "held.scale",
    ),
    "lru_cache": (
        lambda: HeldIn(lru_cache(get_first(LIST)), called),
        lambda *_: LIST.clear(),
        "held closes over|LIST|held",
    ),
    "attrgetter": (lambda: HeldIn(CONFIG, attrgetter("scale")), setting(CONFIG, "scale", 3.0), "held.scale was 2.0"),
    "optimizer": (
        lambda: Of(lambda: OPTIMIZER.param_groups[0]["lr"]),
        lambda *_: OPTIMIZER.param_groups[0].update(lr=3.0),
        r"OPTIMIZER.param_groups\[0\].lr was 2.0 .* is 3.0",
    ),
    "two closures": (lambda: HeldIn(OverClosure(LIST), lambda held: held.get()), lambda *_: LIST.clear(), "held"),
    "property": (lambda: HeldIn(through_property(LIST), scale_of), lambda *_: LIST.append(3.0), "held"),
    "deep": (
        lambda: HeldIn({"a": {"b": {"c": LIST}}}, lambda held: held["a"]["b"]["c"][0]),
        lambda *_: LIST.append(3.0),
        r"held\['a'\]\['b'\]\['c'\] was \[2.0\]",
    ),
}
GONE = ("ChainMap", "lru_cache", "two closures", "its memory")
"""Of these changes the model does not run any more."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused(name: str) -> None:
    kind, change, words = CHANGES[name]
    model, parallel = made(kind)
    torch.testing.assert_close(parallel(batch()), model(batch()))
    change(model, parallel)
    with pytest.raises(RunError, match=words):
        parallel(batch())
    if name not in GONE:
        again = weft.parallelize(model, batch(), "dp=2", cache=None, emulate=True)
        torch.testing.assert_close(again(batch()), model(batch()))


def test_values_of_this_thread() -> None:
    """Ranks of the emulator are threads, which have others."""
    reads = Reads(globals=((__name__, "THREAD", "here"), (__name__, "CONTEXT", "here")), names=(("scale", "here"),))
    outside = Outside(reads, {})
    assert outside.changed() == ""
    THREAD.scale = 3.0
    assert "THREAD.scale was 2.0 when the program was made and is 3.0" in outside.changed()
    THREAD.scale = 2.0
    CONTEXT.set(3.0)
    assert "CONTEXT was 2.0 when the program was made and is 3.0" in outside.changed()
    CONTEXT.set(2.0)
    assert outside.changed() == ""


def test_a_module_that_forward_does_not_compute_with_may_change() -> None:
    model, parallel = made(Teacher)
    with torch.no_grad():
        model.unused[0].weight.add_(1.0)
    parallel(batch())
