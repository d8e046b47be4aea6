"""As `test_outside_reads.py`, of names that forward looks for and that were not there when its program was made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.test_outside_reads import Base, batch, made, setting
from weft.errors import RunError

THIS: Any = sys.modules[__name__]
CONFIG, OTHER = SimpleNamespace(), SimpleNamespace()


class Middle:
    scale = 2.0

    def method(self) -> float:
        return self.scale


class Derived(Middle):
    pass


DERIVED = Derived()


class Of(Base):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read

    def factor(self) -> Any:
        return self.read(self)


def by_except(_: Any) -> float:
    try:
        return CONFIG.bonus
    except AttributeError:
        return 2.0


def over_children(self: Any) -> float:
    return 2.0 * len(list(self.named_children()))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    vars(CONFIG).clear(), vars(OTHER).clear(), vars(DERIVED).clear()
    for owner, names in ((THIS, ("BONUS", "max")), (Of, ("bonus",)), (Derived, ("scale", "method", "bonus"))):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)


READS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "hasattr": (lambda _: 2.0 if hasattr(CONFIG, "bonus") else 1.0, CONFIG, "bonus"),
    "getattr": (lambda _: getattr(CONFIG, "bon" + "us", 1.0), CONFIG, "bonus"),
    "vars": (lambda _: vars(CONFIG).get("bonus", 1.0), CONFIG, "bonus"),
    "dict": (lambda _: 1.0 if "bonus" in CONFIG.__dict__ else 2.0, CONFIG, "bonus"),
    "except": (by_except, CONFIG, "bonus"),
    "globals": (lambda _: globals().get("BONUS", 1.0), THIS, "BONUS"),
    "a module": (lambda _: getattr(THIS, "BONUS", 1.0), THIS, "BONUS"),
    "one of Python's": (lambda _: max(1.0, 2.0), THIS, "max"),
    "the model's class": (lambda self: getattr(self, "bonus", 1.0), Of, "bonus"),
    "a class": (lambda _: getattr(DERIVED, "bonus", 1.0), Derived, "bonus"),
    "over a base's": (lambda _: DERIVED.scale, Derived, "scale"),
    "over a base's method": (lambda _: DERIVED.method(), Derived, "method"),
}


@pytest.mark.parametrize("name", READS)
def test_what_appears_later_is_refused(name: str) -> None:
    read, owner, late = READS[name]
    model, parallel = made(lambda: Of(read))
    torch.testing.assert_close(parallel(batch()), model(batch()))
    setattr(owner, late, 3.0)
    with pytest.raises(RunError, match=rf"{late} was set to 3.0.*test_outside_absent\.py:"):
        parallel(batch())
    delattr(owner, late)
    torch.testing.assert_close(parallel(batch()), model(batch()))


PUT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda it: getattr(it, "bonus", 2.0), lambda it: setattr(it, "bonus", 3.0)),
    "of a child": (lambda it: 2.0 * hasattr(it.a, "bonus"), lambda it: setattr(it.a, "bonus", 3.0)),
    "module": (lambda it: 2.0 * hasattr(it, "bonus"), lambda it: setattr(it, "bonus", nn.Tanh())),
    "add_module": (over_children, lambda it: it.add_module("bonus", nn.Tanh())),
    "buffer": (
        lambda it: 2.0 if "bonus" in dict(it.named_buffers()) else 1.0,
        lambda it: it.register_buffer("bonus", torch.ones(1)),
    ),
}


@pytest.mark.parametrize("name", PUT)
@pytest.mark.parametrize("of_rank", [False, True])
def test_it_is_refused_where_it_is_set_on_the_parallel_module(name: str, of_rank: bool) -> None:
    read, put = PUT[name]
    _, parallel = made(lambda: Of(read))
    with pytest.raises(RunError, match=r"bonus is set, .*test_outside_absent\.py:"):
        put(parallel.ranks[0] if of_rank else parallel)


def test_what_forward_does_not_look_for_may_appear() -> None:
    model, parallel = made(lambda: Of(lambda it: getattr(it, "bonus", 2.0) * hasattr(CONFIG, "other")))
    CONFIG.bonus = OTHER.bonus = OTHER.other = DERIVED.bonus = 3.0
    parallel.note, parallel.a.bonus, parallel.mine = 3, 3, nn.Tanh()
    setting(THIS, "BONUS", 3.0)(None, None)
    torch.testing.assert_close(parallel(batch()), model(batch()))


def test_a_name_that_forward_sets_itself_may_be_absent() -> None:
    class Keeps(Base):
        def factor(self) -> Any:
            if not hasattr(self, "table"):
                self.table = torch.arange(4.0, dtype=torch.float64)
            return self.table

    model, parallel = made(Keeps)
    for _ in range(2):
        torch.testing.assert_close(parallel(batch()), model(batch()))


def test_what_a_function_imports(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weft_test_settings.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def one(_: Any) -> float:
        from weft_test_settings import SCALE

        return SCALE

    def all_of_it(_: Any) -> float:
        import weft_test_settings

        return weft_test_settings.SCALE

    for read in (one, all_of_it):
        _, parallel = made(lambda read=read: Of(read))
        parallel(batch())
        monkeypatch.setattr("weft_test_settings.SCALE", 3.0)
        with pytest.raises(RunError, match=r"weft_test_settings.SCALE was 2.0 .* is 3.0"):
            parallel(batch())
        monkeypatch.undo()
        monkeypatch.syspath_prepend(tmp_path)


def pruned(it: Any) -> None:
    it.b._parameters.pop("weight", None)
    it.b.weight = torch.ones(1)


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda it: setattr(it, "b", nn.Linear(8, 4)), "b is set, and programs go on with what"),
    "add_module": (lambda it: it.add_module("b", nn.Linear(8, 4)), "b is set, and programs go on with what"),
    "in _modules": (
        lambda it: it.net._modules.update({"0": nn.Tanh()}),
        r"net\.0 is set, and programs go on with what",
    ),
    "deleted": (lambda it: it.net._modules.pop("0"), r"net\.0 is set, and programs go on with what"),
    "forward": (lambda it: setattr(it.b, "forward", torch.tanh), r"b\.forward is set, and programs go on with what"),
    "in a list": (lambda it: it.net._modules.update(x=nn.Tanh()), r"net\.x is added"),
    "pruned": (pruned, r"b\.weight is set, and programs go on with the parameter"),
}


class Listed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)), 2.0

    def factor(self) -> Any:
        return self.net(torch.ones(4, dtype=torch.float64)) * self.scale


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("of_rank", [False, True])
def test_a_module_that_is_replaced_is_refused_and_nothing_about_buffers_is_said(name: str, of_rank: bool) -> None:
    change, words = REPLACED[name]
    model, parallel = made(Listed)
    with pytest.raises(RunError, match="b is set"):
        parallel.ranks[0]._modules["b"] = nn.Tanh()
    with pytest.raises(RunError, match=words) as caught:
        change(parallel.ranks[0] if of_rank else parallel)
    assert "call weft.parallelize() again" in caught.value.remedy and "buffer" not in caught.value.remedy
    parallel.mine = nn.Tanh()
    del parallel.mine
    if name == "pruned":  # what it took away is gone
        return
    torch.testing.assert_close(parallel(batch()), model(batch()))


def test_an_attribute_that_is_set_past_the_module() -> None:
    _, parallel = made(Listed)
    vars(parallel.ranks[0])["note"] = 3
    parallel(batch())
    vars(parallel.ranks[0])["scale"] = 3.0
    with pytest.raises(RunError, match=r"scale was set to 3.0, and forward reads it at .*test_outside_absent\.py:"):
        parallel(batch())


def test_a_bias_that_is_taken_away() -> None:
    _, parallel = made(Listed)
    parallel(batch())
    parallel.ranks[0].a.bias = None
    with pytest.raises(RunError, match=r"a\.bias was taken away") as caught:
        parallel(batch())
    assert "parameter.zero_()" in caught.value.remedy


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.Dropout])
def test_the_mode_of_a_module_that_the_model_does_not_own(kind: Any) -> None:
    class Teaches(Base):
        def __init__(self) -> None:
            super().__init__()
            self.held = [nn.Sequential(nn.Linear(4, 4), kind(4 if kind is nn.BatchNorm1d else 0.5)).double().eval()]
            self.plain = [nn.Linear(4, 4, dtype=torch.float64)]
            for one in (*self.held, *self.plain):
                one.requires_grad_(False)

        def factor(self) -> Any:
            return self.plain[0](self.held[0](torch.ones(2, 4, dtype=torch.float64))).sum()

    model, parallel = made(Teaches)
    model.plain[0].eval()
    torch.testing.assert_close(parallel(batch()), model(batch()))
    model.held[0].train()
    with pytest.raises(RunError, match=r"held\[0\]\.1\.training was False .* is True"):
        parallel(batch())
