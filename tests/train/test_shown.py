"""What a parallel module shows of the original is what users' loops expect of it, or is refused: classes, methods,
properties, attributes of parameters, containers, buffers, extra state. On ranks and emulated."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError, WeftError

PLANS = ["dp=2", "tp=2", "dp=2,zero=3", "dp=2,spread", "pp=2,microbatches=2,stages=b"]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Body = Callable[[Any], Any]


class Extra:
    """Stands behind nn.Module among the bases."""

    plan: Any = None

    @property
    def options_again(self) -> Any:
        return self.options  # type: ignore[attr-defined]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.calls = 3

    @property
    def width(self) -> int:
        return self.lin.weight.shape[0]

    @property
    def wide(self) -> int:
        return self.calls * 2

    def helper(self) -> Tensor:
        return self.lin.weight.sum()

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Net(nn.Module, Extra):
    plan = Block

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([Block()])
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 4)})
        self.options, self.names, self.kinds = {"x": [1]}, ["n"], {"k"}
        self.step, self.seed, self.program, self.reduction = 5, 6, 7, "sum"
        self.hidden = [torch.ones(2)]
        self.register_buffer("mean", torch.ones(4))
        self.a.weight.lr_scale = 0.5  # type: ignore[attr-defined]
        self.norm.weight._no_weight_decay = True  # type: ignore[attr-defined]
        self.b.bias.is_expert = True  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def init(self) -> None:
        nn.init.zeros_(self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.heads["one"](self.blocks[0](self.b(self.norm(self.a(x)))))
        return (x * self.mean).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def everywhere(model: nn.Module, plan: str, body: Body) -> None:
    """Do it with the emulated module, and on every rank of its own."""
    body(weft.parallelize(copy_of(model), (X,), plan, emulate=True, cache=None))
    on_ranks(copy_of(model), (X,), plan, body)


def copy_of(model: nn.Module) -> nn.Module:
    """With the attributes of its parameters, which a copy has not."""
    found = copy.deepcopy(model)
    for one, other in zip(found.parameters(), model.parameters(), strict=True):
        vars(one).update(vars(other))
    return found


plans = pytest.mark.parametrize("plan", PLANS)


@plans
def test_modules_are_found_by_class(plan: str) -> None:
    def body(parallel: Any) -> None:
        assert isinstance(parallel, Net) and parallel.__class__.__name__ == "Net"
        linear = [one for one in parallel.modules() if isinstance(one, nn.Linear)]
        norms = [one for one in parallel.modules() if isinstance(one, nn.BatchNorm1d)]
        count = len(getattr(parallel, "ranks", (0,)))
        assert (len(linear), len(norms)) == (4 * count, count)
        assert {one.__class__.__name__ for one in linear} == {"Linear"} and "in_features=4" in repr(linear[0])
        found = {id(p) for one in linear for p in one.parameters(recurse=False)}
        names = [name for name, one in parallel.named_parameters() if id(one) in found]
        assert len(names) == len(found) and not any("norm" in name for name in names)
        assert len(found) + sum(1 for one in norms for _ in one.parameters()) == len(list(parallel.named_parameters()))
        if "spread" not in plan and "pp" not in plan:
            assert all(id(one.weight) in found for one in linear)
        assert parallel.blocks[0].lin.bias is None

    everywhere(net(), plan, body)


def test_groups_by_class_train_as_eager() -> None:
    for plan in ("dp=2", "tp=2", "dp=2,zero=3"):
        eager = net()
        parallel: Any = weft.parallelize(copy.deepcopy(eager), (X,), plan, emulate=True, cache=None)
        for module in (eager, parallel):
            decay = [one.weight for one in module.modules() if isinstance(one, nn.Linear)]
            ids = {id(one) for one in decay}
            rest = [one for one in module.parameters() if id(one) not in ids]
            groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest}]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            for norm in (one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)):
                norm.eval()
            for _ in range(2):
                optimizer.zero_grad()
                module(X).backward()
                optimizer.step()
        for name, one in eager.state_dict().items():
            if isinstance(one, Tensor):
                torch.testing.assert_close(parallel.state_dict()[name], one, rtol=0, atol=1e-12)


@plans
def test_methods_are_refused_and_named(plan: str) -> None:
    def body(parallel: Any) -> None:
        for call, name in (
            (parallel.init, "init"),
            (parallel.blocks[0].helper, r"blocks\.0\.helper"),
            (parallel.a.reset_parameters, r"a\.reset_parameters"),
            (lambda: parallel.a.forward(X), r"a\.forward"),
            (lambda: parallel.blocks[0](X), r"blocks\.0\.forward"),
        ):
            with pytest.raises(RunError, match=rf"{name}\(\) of \w+ would work on what this rank holds") as caught:
                call()
            assert "try:" in str(caught.value)
        with pytest.raises(RunError, match=r"reset_parameters\(\) of Linear"):
            parallel.apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)
        assert parallel.blocks[0].twice(2) == 4
        assert list(parallel.heads) == ["one"] and len(parallel.heads) == 1 and "one" in parallel.heads
        assert parallel.heads["one"] is dict(parallel.heads.items())["one"]
        assert parallel.blocks[:1][0] is parallel.blocks[0]
        with pytest.raises(RunError, match=r"a\.forward is set"):
            parallel.a.forward = lambda x: x
        with pytest.raises(RunError, match="norm is set"):
            parallel.norm = nn.Identity()

    everywhere(net(), plan, body)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_properties_are_the_originals_or_refused(plan: str) -> None:
    def body(parallel: Any) -> None:
        assert parallel.blocks[0].wide == 6 and parallel.device == torch.device("cpu")
        assert parallel.plan is Block and parallel.options_again == {"x": [1]}

    everywhere(net(), plan, body)


def test_a_property_of_shards_is_refused() -> None:
    def body(parallel: Any) -> None:
        with pytest.raises(RunError, match=r"blocks\.0\.width is a property of Block"):
            _ = parallel.blocks[0].width

    on_ranks(net(), (X,), "dp=2,zero=3", body)
    on_ranks(net(), (X,), "dp=2", lambda parallel: parallel.blocks[0].width)


def marks(parallel: Any) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, one in parallel.named_parameters(remove_duplicate=False):
        seen = (getattr(one, "lr_scale", 0), getattr(one, "_no_weight_decay", 0), getattr(one, "is_expert", 0))
        if any(seen):
            found[".".join(name.split(".")[-2:])] = seen
    return found


MARKS = {"a.weight": (0.5, 0, 0), "norm.weight": (0, True, 0), "b.bias": (0, 0, True)}


@plans
def test_attributes_of_parameters(plan: str) -> None:
    model = net()
    for name in ("a.weight", "norm.weight", "b.bias"):  # Module.double() keeps the parameters
        assert name in marks(model)
    found: dict[str, tuple[Any, ...]] = {}
    everywhere(model, plan, lambda parallel: found.update(marks(parallel)))
    assert found == MARKS
    for told in on_ranks(copy_of(model), (X,), plan, marks):
        assert told.items() <= MARKS.items()


def test_attributes_of_parameters_of_functions_and_of_masters(tmp_path: Path) -> None:
    x = X.float()
    for plan in ("tp=2", "pp=2,microbatches=2,stages=b"):
        for _ in range(2):
            parallel = weft.parallelize(Net, (x,), plan, emulate=True, cache=tmp_path, precision="bf16")
            assert marks(parallel) == MARKS
    with torch.device("meta"):
        model = Net()
    parallel = weft.parallelize(model, (x,), "tp=2", emulate=True, cache=None, weights=Net().state_dict())
    assert marks(parallel) == MARKS


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.weight.lr_scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2,stages=b"])
def test_attributes_of_tied_parameters(plan: str) -> None:
    found: dict[str, Any] = {}
    for told in on_ranks(Tied().double(), (X,), plan, marks):
        found.update(told)
    assert found == dict.fromkeys(("a.weight", "b.weight"), (0.5, 0, 0))


@plans
def test_names_that_the_runtime_has_too(plan: str) -> None:
    def body(parallel: Any) -> None:
        ranks = getattr(parallel, "ranks", [parallel])
        for name in ("step", "seed", "program", "reduction"):
            with pytest.raises(RunError, match=f"{name} is set, and programs do not read it"):
                setattr(parallel, name, 9)
        assert [rank.step for rank in ranks] == [0] * len(ranks)
        parallel.train_step((X,), torch.optim.SGD(parallel.parameters(), lr=0.1))
        assert [rank.step for rank in ranks] == [1] * len(ranks)

    everywhere(net(), plan, body)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_the_step_can_be_set(plan: str) -> None:
    def body(parallel: Any) -> None:
        parallel.step, parallel.seed = 7, 3
        assert [(rank.step, rank.seed) for rank in getattr(parallel, "ranks", [parallel])] == [(7, 3)] * (
            len(getattr(parallel, "ranks", "x"))
        )

    everywhere(Tied().double(), plan, body)


@plans
def test_buffers_that_are_set(plan: str) -> None:
    eager = net()
    before = eager(X)
    eager = net()
    eager.mean = torch.full((4,), 3.0, dtype=torch.float64)
    eager.norm.running_mean = torch.full((8,), 2.0, dtype=torch.float64)
    expected = eager(X)
    assert not torch.allclose(before, expected)

    def body(parallel: Any) -> None:
        parallel.mean = torch.full((4,), 3.0, dtype=torch.float64)
        parallel.norm.running_mean = torch.full((8,), 2.0, dtype=torch.float64)
        loss = parallel.train_step((X,), torch.optim.SGD(parallel.parameters(), lr=0.0))
        if "pp" not in plan:  # statistics of micro-batches are others
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
            found = parallel.full_state_dict()["norm.running_mean"]
            torch.testing.assert_close(found, eager.norm.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(parallel.full_state_dict()["mean"], eager.mean)
        for wrong in (torch.zeros(9).double(), torch.zeros(4), None, 3.0):
            with pytest.raises(RunError, match="mean"):
                parallel.mean = wrong

    everywhere(net(), plan, body)


@plans
def test_extra_state(plan: str, tmp_path: Path) -> None:
    model = net()
    model.blocks[0].calls = 11  # type: ignore[union-attr]
    folder = tmp_path / "run"

    def body(parallel: Any) -> None:
        full = parallel.full_state_dict()
        other = net()
        other.load_state_dict(full)
        assert other.blocks[0].calls == 11  # type: ignore[union-attr]
        parallel.load_state_dict(parallel.state_dict())
        state = parallel.state_dict()
        state["blocks.0._extra_state"] = {"calls": 4}
        with pytest.raises(RunError, match=r"extra state of blocks\.0"):
            parallel.load_state_dict(state)
        weft.save(folder, parallel)
        weft.load(folder, parallel)

    everywhere(model, plan, body)
    told = json.loads(next(folder.glob("step-*/training.json")).read_text())
    assert told["states"] == {"blocks.0._extra_state": {"calls": 11}}
    with pytest.raises(WeftError, match=r"extra state of blocks\.0"):
        weft.load(folder, weft.parallelize(net(), (X,), plan, emulate=True, cache=None))


def test_extra_state_in_weights() -> None:
    model = net()
    weft.parallelize(model, (X,), "dp=2", emulate=True, cache=None, weights=net().state_dict())
    other = net()
    other.blocks[0].calls = 4  # type: ignore[union-attr]
    with pytest.raises(RunError, match=r"extra state of blocks\.0"):
        weft.parallelize(net(), (X,), "dp=2", emulate=True, cache=None, weights=other.state_dict())


class Said(Tied):
    def get_extra_state(self) -> Any:
        return {"sum": self.a.weight}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_that_follows_weights_is_refused() -> None:
    parallel: Any = weft.parallelize(Said(), (X.float(),), "dp=2", emulate=True, cache=None)
    with pytest.raises(RunError, match="the extra state of the model cannot be told"):
        parallel.full_state_dict()


@plans
def test_containers_are_read_and_not_changed(plan: str) -> None:
    def body(parallel: Any) -> None:
        assert (parallel.options, parallel.names, parallel.kinds) == ({"x": [1]}, ["n"], {"k"})
        assert isinstance(parallel.options, dict) and json.dumps(parallel.options) == '{"x": [1]}'
        for name, change in (
            ("options", lambda: parallel.options.update(x=2)),
            ("options", lambda: parallel.options["x"].append(2)),
            ("options", lambda: parallel.options.__setitem__("x", 1)),
            ("names", lambda: parallel.names.append("m")),
            ("kinds", lambda: parallel.kinds.add("m")),
        ):
            with pytest.raises(RunError, match=f"{name} is changed, and programs do not read it"):
                change()
        copied = copy.deepcopy(parallel.options)
        copied["x"].append(3)
        assert copied == {"x": [1, 3]} and type(copied) is dict
        with pytest.raises(RunError, match="hidden holds tensors"):
            _ = parallel.hidden

    everywhere(net(), plan, body)


def test_what_is_set_besides() -> None:
    """Values, and modules without tensors, which follow the modes. What would be among parameters and in state dicts
    is refused: nothing that works on the model would know of it."""

    def refused(what: str, change: Callable[[], Any]) -> None:
        with pytest.raises(RunError, match=what) as caught:
            change()
        assert caught.value.remedy

    def body(parallel: Any) -> None:
        parallel.note, parallel.drop, parallel.a.drop = "n", nn.Dropout(), nn.Sequential(nn.Dropout())
        for mode in (False, True):
            parallel.train(mode)
            assert parallel.drop.training == parallel.a.drop[0].training == mode
        for at in (parallel, parallel.a):
            refused("no part of the model", partial(setattr, at, "temp", nn.Parameter(torch.ones(()))))
            refused("no part of the model", partial(setattr, at, "head", nn.Linear(4, 4)))
            refused("no part of the model", partial(at.add_module, "head", nn.BatchNorm1d(4)))
            refused("no part of the model", partial(at.register_buffer, "seen", torch.ones(2)))
        refused("blocks is set", partial(parallel.add_module, "blocks", nn.Identity()))
        refused("blocks is deleted", partial(delattr, parallel, "blocks"))
        refused("set to Block", partial(setattr, parallel, "__class__", Block))
        refused("deleted|blocks.0.lin", partial(nn.utils.parametrizations.weight_norm, parallel.blocks[0].lin))
        assert parallel(X).dim() == 0

    on_ranks(net(), (X,), "dp=2", body)


@pytest.mark.parametrize("emulated", [False, True])
def test_items(emulated: bool) -> None:
    """Those of a model that is a list itself, too."""

    def body(parallel: Any) -> None:
        assert len(parallel) == 3 and isinstance(parallel[0], nn.Linear) and parallel[-1] is parallel[2]
        assert [type(one).__name__ for one in parallel] and len(parallel[:2]) == 2 and parallel[1][0] is not None
        for holder, key, what in ((parallel, 0, "0"), (parallel[1], 0, r"1\.0"), (parallel[1], -1, r"1\.-1")):
            with pytest.raises(RunError, match=f"{what} is set"):
                holder[key] = nn.Identity()
            with pytest.raises(RunError, match=f"{what} is deleted"):
                del holder[key]
        assert parallel(X).shape == (8, 4)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()), nn.Linear(4, 4)).double()
    if emulated:
        body(weft.parallelize(model, (X,), "dp=2", emulate=True, cache=None))
    else:
        on_ranks(model, (X,), "dp=2", body, outputs="any")
    assert not hasattr(weft.parallelize(net(), (X,), "dp=2", emulate=True, cache=None), "__len__")
