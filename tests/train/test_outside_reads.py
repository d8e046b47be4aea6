"""What forward reads besides its inputs, and a loop changes later: refused with the line that reads it. What forward
does not read may be changed."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.captures import CAPTURES
from weft.errors import RunError

THIS: Any = sys.modules[__name__]
TEMPERATURE, LIST, DICT, TENSOR = 2.0, [2.0], {"scale": 2.0}, torch.full((4,), 2.0, dtype=torch.float64)
NAMESPACE, UNREAD, LOG, DTYPES = argparse.Namespace(scale=2.0), 1, [1.0], {"unread": torch.float32}
ACTIVATION: Callable[[Tensor], Tensor] = torch.tanh
SEEN: dict[str, bool] = {}


@dataclass
class Config:
    scale: float = 2.0
    unread: float = 1.0


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


CONFIG, SLOTS = Config(), Slots()


class Base(nn.Module):
    """A factor of 2, from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def factor(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(torch.tanh(self.a(x))) * self.factor()).square().mean()


class Global(Base):
    def factor(self) -> Any:
        return TEMPERATURE


class GlobalList(Base):
    def factor(self) -> Any:
        return LIST[0]


class GlobalDict(Base):
    def factor(self) -> Any:
        return DICT.get("scale", 1.0)


class GlobalTensor(Base):
    def factor(self) -> Any:
        return TENSOR


class GlobalObject(Base):
    def factor(self) -> Any:
        config = CONFIG
        return getattr(config, "scale")  # noqa: B009 - by its name


class GlobalSlots(Base):
    def factor(self) -> Any:
        return SLOTS.scale


class GlobalNamespace(Base):
    def factor(self) -> Any:
        return NAMESPACE.scale


class GlobalFunction(Base):
    def factor(self) -> Any:
        return ACTIVATION(torch.ones(4, dtype=torch.float64))


class OfHelper(Base):
    def factor(self) -> Any:
        return helper()


def helper(scale: list[float] = LOG) -> float:
    return TEMPERATURE * scale[0]


class OfClass(Base):
    scale = 2.0

    def factor(self) -> Any:
        return self.scale


class OfConfigClass(Base):
    def factor(self) -> Any:
        return Config.scale


class OfInstance(Base):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.table, self.plain = Config(), {"scale": [2.0]}, 2.0
        self.spaces = [SimpleNamespace(scale=1.0)]

    def factor(self) -> Any:
        config = self.config
        return config.scale * self.table["scale"][0] * self.plain * self.spaces[0].scale


class Environment(Base):
    def factor(self) -> Any:
        return float(os.environ.get("WEFT_TEST_SCALE", "2")) * ("WEFT_TEST_OTHER" in os.environ or 1)


class Getenv(Base):
    def factor(self) -> Any:
        return float(os.getenv("WEFT_TEST_SCALE", "2"))


class DefaultDtype(Base):
    def factor(self) -> Any:
        return 2.0 if torch.get_default_dtype() == torch.float32 else 3.0


class MadeInDefaultDtype(Base):
    def factor(self) -> Any:
        return torch.full((4,), 1.0) / 3


class OfDropout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def factor(self) -> Any:
        return self.drop(torch.ones(4, dtype=torch.float64))


class AsksParameter(Base):
    def factor(self) -> Any:
        return 2.0 if self.a.weight.requires_grad else 3.0


class AsksAny(Base):
    def factor(self) -> Any:
        return 2.0 if any(one.requires_grad for one in self.a.parameters()) else 3.0


class AsksMade(Base):
    def factor(self) -> Any:
        return 2.0 if self.a(torch.ones(1, 4, dtype=torch.float64)).requires_grad else 3.0


def closing() -> tuple[type[Base], Callable[[float], None]]:
    scale = 2.0

    class Closure(Base):
        def factor(self) -> Any:
            return scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Closure, change


CLOSURE, change_closure = closing()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(kind: Callable[[], nn.Module], plan: str = "dp=2", **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = kind()
    return model, weft.parallelize(model, batch(), plan, emulate=True, **{"cache": None, **settings})


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    saved = copy.deepcopy((DICT, LIST, LOG, vars(CONFIG), vars(NAMESPACE)))
    values = TEMPERATURE, TENSOR, ACTIVATION, helper.__defaults__
    with CAPTURES.sleep():
        yield
    for held, before in zip((DICT, LIST, LOG, vars(CONFIG), vars(NAMESPACE)), saved, strict=True):
        held.clear()
        held.extend(before) if isinstance(held, list) else held.update(before)
    THIS.TEMPERATURE, THIS.TENSOR, THIS.ACTIVATION, helper.__defaults__ = values
    SLOTS.scale, OfClass.scale, Config.scale = 2.0, 2.0, 2.0
    change_closure(2.0)
    os.environ.pop("WEFT_TEST_SCALE", None)
    torch.set_default_dtype(torch.float32)


def setting(owner: Any, name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, parallel: setattr(owner, name, value)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], str]] = {
    "global": (Global, setting(THIS, "TEMPERATURE", 3.0), r"TEMPERATURE was 2.0 .* is 3.0"),
    "list": (GlobalList, lambda *_: LIST.append(3.0), r"LIST was \[2.0\] .* is \[2.0, 3.0\]"),
    "dict": (GlobalDict, lambda *_: DICT.update(scale=3.0), r"DICT was {'scale': 2.0} .* is {'scale': 3.0}"),
    "tensor in place": (GlobalTensor, lambda *_: TENSOR.mul_(1.0), "TENSOR was changed in place"),
    "another tensor": (GlobalTensor, setting(THIS, "TENSOR", TENSOR.clone()), "TENSOR is another one .*a tensor"),
    "object": (GlobalObject, setting(CONFIG, "scale", 3.0), r"CONFIG.scale was 2.0 .* is 3.0"),
    "slots": (GlobalSlots, setting(SLOTS, "scale", 3.0), r"SLOTS.scale was 2.0 .* is 3.0"),
    "namespace": (GlobalNamespace, setting(NAMESPACE, "scale", 3.0), r"NAMESPACE.scale was 2.0 .* is 3.0"),
    "function": (GlobalFunction, setting(THIS, "ACTIVATION", torch.sigmoid), "ACTIVATION was .*tanh.* is .*sigmoid"),
    "in a helper": (OfHelper, setting(THIS, "TEMPERATURE", 3.0), r"TEMPERATURE was 2.0 .* is 3.0"),
    "default": (OfHelper, setting(helper, "__defaults__", ([3.0],)), "default arguments of helper"),
    "default in place": (OfHelper, lambda *_: LOG.append(1.0), "default arguments of helper"),
    "class": (OfClass, setting(OfClass, "scale", 3.0), r"OfClass.scale was 2.0 .* is 3.0"),
    "over the class's": (OfClass, lambda model, _: setattr(model, "scale", 3.0), "scale was set to 3.0"),
    "config class": (OfConfigClass, setting(Config, "scale", 3.0), r"Config.scale was 2.0 .* is 3.0"),
    "config": (OfInstance, lambda model, _: setattr(model.config, "scale", 3.0), r"config.scale was 2.0 .* is 3.0"),
    "shown config": (OfInstance, lambda _, it: setattr(it.config, "scale", 3.0), r"config.scale was 2.0 .* is 3.0"),
    "table": (OfInstance, lambda model, _: model.table["scale"].append(3.0), r"table\['scale'\] was \[2.0\]"),
    "in a list": (OfInstance, lambda model, _: setattr(model.spaces[0], "scale", 3.0), r"spaces\[0\].scale was 1.0"),
    "attribute": (OfInstance, lambda model, _: setattr(model, "plain", 3.0), r"plain was 2.0 .* is 3.0"),
    "gone": (OfInstance, lambda model, _: delattr(model, "plain"), r"plain was 2.0 .* is gone"),
    "dropout": (OfDropout, lambda model, _: setattr(model.drop, "p", 0.5), r"drop.p was 0.0 .* is 0.5"),
    "environment": (Environment, lambda *_: os.environ.update(WEFT_TEST_SCALE="3"), "WEFT_TEST_SCALE was None"),
    "getenv": (Getenv, lambda *_: os.environ.update(WEFT_TEST_SCALE="3"), "WEFT_TEST_SCALE was None"),
    "closure": (CLOSURE, lambda *_: change_closure(3.0), r"scale \(which .*factor closes over\) was 2.0 .* is 3.0"),
    "default dtype": (DefaultDtype, lambda *_: torch.set_default_dtype(torch.float64), "default dtype was"),
    "made in it": (MadeInDefaultDtype, lambda *_: torch.set_default_dtype(torch.float64), "default dtype was"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused(name: str) -> None:
    kind, change, words = CHANGES[name]
    model, parallel = made(kind)
    torch.testing.assert_close(parallel(batch()), model(batch()))
    change(model, parallel)
    with pytest.raises(RunError, match=words) as caught:
        parallel(batch())
    assert "test_outside_reads.py:" in str(caught.value) or name == "dropout"
    assert "register_buffer" in caught.value.remedy
    if name != "gone":
        again = weft.parallelize(model, batch(), "dp=2", cache=None, emulate=True)
        again.eval(), model.eval()
        torch.testing.assert_close(again(batch()), model(batch()))


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "pp=2,microbatches=2"])
def test_it_is_refused_under_every_plan_and_in_every_step(plan: str) -> None:
    _, parallel = made(Global, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(batch(), optimizer)
    THIS.TEMPERATURE = 3.0
    for _ in range(2):
        with pytest.raises(RunError, match=r"TEMPERATURE was 2.0"):
            parallel.train_step(batch(), optimizer)
    THIS.TEMPERATURE = 4.0 / 2
    parallel.train_step(batch(), optimizer)


@pytest.mark.parametrize("kind", [AsksParameter, AsksAny, AsksMade])
@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_a_parameter_that_forward_asks_about_is_frozen(kind: type[Base], plan: str) -> None:
    _, parallel = made(kind, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(batch(), optimizer)
    frozen = [one for name, one in parallel.named_parameters() if ".a." in name]
    for one in frozen:
        one.requires_grad_(False)
    with pytest.raises(RunError, match=r"requires_grad of a\.\w+ .*was True .* is False.*test_outside_reads\.py"):
        parallel.train_step(batch(), optimizer)
    for one in frozen:
        one.requires_grad_(True)
    parallel.train_step(batch(), optimizer)


def test_one_that_it_does_not_ask_about_may_be_frozen() -> None:
    _, parallel = made(AsksParameter)
    for name, one in parallel.named_parameters():
        one.requires_grad_(".a." in name)
    parallel(batch()).backward()


def test_evaluation_has_the_values_that_it_is_made_with() -> None:
    model, parallel = made(Global)
    parallel(batch())
    THIS.TEMPERATURE = 3.0
    parallel.eval(), model.eval()
    torch.testing.assert_close(parallel(batch()), model(batch()))
    parallel.train()
    with pytest.raises(RunError, match=r"TEMPERATURE was 2.0"):
        parallel(batch())
    THIS.TEMPERATURE = 2.0
    parallel(batch())
    parallel.eval()
    with pytest.raises(RunError, match=r"TEMPERATURE was 3.0"):
        parallel(batch())


class More(Global):
    def forward(self, x: Tensor) -> Any:
        return {"loss": super().forward(x), "scaled": x * TEMPERATURE}


def test_a_second_program_of_one_capture_has_its_values() -> None:
    _, parallel = made(More)
    THIS.TEMPERATURE = 3.0
    with pytest.raises(RunError, match=r"TEMPERATURE was 2.0"):
        parallel(batch())


def test_a_model_from_a_function() -> None:
    config = Config()

    class Own(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def factor(self) -> Any:
            return self.config.scale

    torch.manual_seed(0)
    parallel = weft.parallelize(Own, batch(), "dp=2", cache=None, emulate=True)
    parallel(batch())
    config.scale = 3.0
    with pytest.raises(RunError, match=r"config.scale was 2.0"):
        parallel(batch())


def test_a_cached_program_is_watched_and_another_value_has_another(tmp_path: Path) -> None:
    for scale in (2.0, 3.0, 2.0):
        THIS.TEMPERATURE = scale
        model, parallel = made(Global, cache=tmp_path)
        torch.testing.assert_close(parallel(batch()), model(batch()))
    assert len(list(tmp_path.iterdir())) == 2
    THIS.TEMPERATURE = 3.0
    with pytest.raises(RunError, match=r"TEMPERATURE was 2.0 .* is 3.0"):
        parallel(batch())


class Quiet(OfInstance):
    """Reads, fills and ignores what may change."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.name = "quiet"

    def forward(self, x: Tensor) -> Tensor:
        if "said" not in SEEN:
            SEEN["said"] = True
        if x.shape[0] > 100:
            return x.mean() * UNREAD + self.config.unread
        return super().forward(x)

    def report(self) -> str:
        return f"{self.name} {self.history} {UNREAD} {DTYPES}"


def test_what_forward_does_not_read_may_change() -> None:
    model, parallel = made(Quiet)
    eager = copy.deepcopy(model)
    for step in range(3):
        THIS.UNREAD = step
        DTYPES[str(step)] = torch.float64
        model.config.unread = model.name = step
        model.history.append(step)
        model.config.scale, model.table["scale"][0] = 4.0 / 2, float("2")
        model(batch())
        torch.testing.assert_close(parallel(batch()), eager(batch()))
        SEEN.clear()


def test_a_model_that_reads_nothing_is_not_watched() -> None:
    class Plain(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).square().mean()

    _, parallel = made(Plain)
    rank = parallel.ranks[0]
    outside = rank._outside[rank._flow]
    assert not outside._watched
    assert [one.names for one in outside._spaces] == [("forward",)]
