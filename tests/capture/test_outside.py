"""What forward reads and changes besides its inputs: carried, or refused with the line."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts
from weft.capture.tracing import surroundings
from weft.capture.tracing.fingerprint import fingerprint
from weft.errors import CaptureError, WeftError

COUNT = itertools.count(1)
CALLS = 0
NUMBERS = {"n": 0}
LOG: list[float] = []
TABLES: dict[int, Tensor] = {}
WARNED = False


class Base(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x)) * self.factor(x)).square().mean()

    def factor(self, x: Tensor) -> Any:
        return 1.0


def counts(self: Base, x: Tensor) -> Any:
    return next(COUNT)


def counts_globally(self: Base, x: Tensor) -> Any:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return CALLS


def counts_in_its_class(self: Base, x: Tensor) -> Any:
    Base.calls += 1
    return 1.0 if Base.calls < 1000 else 2.0


def counts_in_a_dict(self: Base, x: Tensor) -> Any:
    NUMBERS["n"] += 1
    return 1.0


def counts_in_a_default(self: Base, x: Tensor, calls: list[int] = []) -> Any:  # noqa: B006 - a habit to be refused
    calls.append(1)
    return 1.0


def logs(self: Base, x: Tensor) -> Any:
    LOG.append(1.0)
    return 1.0


def reads_the_clock(self: Base, x: Tensor) -> Any:
    return float(int(time.time()) % 2)


def reads_the_system(self: Base, x: Tensor) -> Any:
    return int.from_bytes(os.urandom(7), "big") / 2**56


def seeds(self: Base, x: Tensor) -> Any:
    torch.manual_seed(5)
    return torch.rand(4)


def seeds_aside(self: Base, x: Tensor) -> Any:
    with torch.random.fork_rng():
        return torch.rand(4)


OUTSIDE = [
    (counts, "COUNT"),
    (counts_globally, "CALLS"),
    (counts_in_its_class, "calls"),
    (counts_in_a_dict, "NUMBERS"),
    (counts_in_a_default, "default 0"),
    (logs, "LOG"),
    (reads_the_clock, "clock"),
    (reads_the_system, "a second forward"),
    (seeds, "seeds"),
    (seeds_aside, "seeds"),
]


@pytest.mark.parametrize(("habit", "words"), OUTSIDE, ids=lambda one: getattr(one, "__name__", ""))
def test_state_outside_the_module_is_refused(habit: Callable[..., Any], words: str) -> None:
    kind = type("Habit", (Base,), {"factor": habit, "__module__": __name__})
    module, x = kind(), torch.randn(8, 4)
    states = torch.get_rng_state()
    with pytest.raises(CaptureError, match=words) as caught:
        weft.capture(module, (x,))
    assert "test_outside.py" in str(caught.value)
    assert torch.equal(states, torch.get_rng_state())
    assert (CALLS, NUMBERS, LOG, Base.calls) == (0, {"n": 0}, [], 0), "all is as it was"


@pytest.mark.parametrize(
    ("habit", "line"),
    [
        (counts, "next(COUNT)"),
        (counts_globally, "CALLS += 1"),
        (counts_in_its_class, "Base.calls += 1"),
        (counts_in_a_dict, 'NUMBERS["n"] += 1'),
        (counts_in_a_default, "calls.append(1)"),
        (logs, "LOG.append(1.0)"),
    ],
)
def test_the_line_that_changes_it_is_named(habit: Callable[..., Any], line: str) -> None:
    kind = type("Habit", (Base,), {"factor": habit, "__module__": __name__})
    with pytest.raises(CaptureError) as caught:
        weft.capture(kind(), (torch.randn(8, 4),))
    assert line in caught.value.place


def test_what_is_said_once_may_be_said() -> None:
    class Once(Base):
        def factor(self, x: Tensor) -> Any:
            global WARNED  # noqa: PLW0603
            WARNED = True
            return 1.0

    weft.capture(Once(), (torch.randn(8, 4),))
    assert not WARNED, "the next forward says it again"


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size).double()


def kept_table(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.arange(size).double()
    return TABLES[size]


def remembering(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    kept = functools.lru_cache(function)
    return lambda size: kept(size)  # noqa: PLW0108 - a closure, as decorators make it


class Tables(Base):
    """The cache is in the closure of a static method."""

    @staticmethod
    @remembering
    def table(size: int) -> Tensor:
        return torch.arange(size).double()


def memoised(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    kept: dict[int, Tensor] = {}

    def get(size: int) -> Tensor:
        if size not in kept:
            kept[size] = function(size)
        return kept[size]

    return get


@memoised
def memoised_table(size: int) -> Tensor:
    return torch.arange(size).double()


class Cache:
    """Keeps tables beside the model: one for all, and one of each object."""

    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    @classmethod
    def of_all(cls, size: int) -> Tensor:
        return cls.shared.setdefault(size, torch.arange(size).double())

    def get(self, size: int) -> Tensor:
        return self.kept.setdefault(size, torch.arange(size).double())


CACHE = Cache()
GETS = {
    "lru_cache": table,
    "dict": kept_table,
    "static": Tables.table,
    "closure": memoised_table,
    "class": Cache.of_all,
    "object": CACHE.get,
    "closure of forward": memoised(table.__wrapped__),
}


@pytest.mark.parametrize("get", GETS.values(), ids=GETS)
def test_caches_of_tensors_stay_the_users(get: Callable[[int], Tensor]) -> None:
    class Cached(Tables):
        def factor(self, x: Tensor) -> Any:
            return get(x.shape[1])

    module, x = Cached().double(), torch.randn(8, 4, dtype=torch.float64)
    for _ in range(2):
        assert weft.verify(module, (x,), plan="dp=2").equal
        parallel = weft.parallelize(module, (x,), plan="dp=2", emulate=True, cache=None)
        assert torch.allclose(parallel(x), module(x), atol=1e-12), "eager runs on real tensors"
        parallel.eval()
        assert torch.allclose(parallel(x), module(x), atol=1e-12)


class Frozen(Base):
    """Regions without gradients, in every surrounding."""

    def __init__(self, region: Callable[[], Any], outer: Callable[[], Any]) -> None:
        super().__init__()
        self.region, self.outer = region, outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b(y)
        with self.outer(), self.region():
            z = z * 2 + 1
        return (y * z.clone()).mean()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "pp=2,microbatches=2"])
@pytest.mark.parametrize("outer", ["plain", "autocast", "enable_grad"])
@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_no_gradient_flows_through_regions_without(region: Callable[[], Any], outer: str, plan: str) -> None:
    around = {"plain": torch.enable_grad, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    module = Frozen(region, around.get(outer, torch.enable_grad)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    if region is torch.inference_mode:
        module.b.requires_grad_(False)
    parallel = weft.parallelize(module, (x,), plan=plan, emulate=True, cache=None)
    parallel.forward_backward((x,))
    held = [(name.split(".", 2)[2], one) for name, one in parallel.named_parameters() if one.numel()]
    found = parts({name: one.grad for name, one in held if one.grad is not None})
    module(x).backward()
    for name, one in module.named_parameters():
        if one.grad is None:
            assert name not in found, f"{name} has no gradient"
        else:
            assert torch.allclose(found[name], one.grad, atol=1e-12), name


def test_a_parameter_that_is_only_read_detached_has_no_gradient() -> None:
    class Detached(Base):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) * self.p.detach()
            return (self.b(x) * self.p.detach()).square().mean()

    x = torch.randn(8, 4)
    assert weft.verify(Detached(), (x,), plan="pp=2,microbatches=2").equal


class Alias(Base):
    def __init__(self, keep: Callable[[Alias], None]) -> None:
        super().__init__()
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x)) + x @ self.v).square().mean()


def as_buffer(module: Alias) -> None:
    module.register_buffer("v", module.a.weight.data)


def as_attribute(module: Alias) -> None:
    module.v = module.a.weight.data


def as_row(module: Alias) -> None:
    module.register_buffer("v", module.a.weight.data[1:2].expand(4, 4))


def as_overlap(module: Alias) -> None:
    flat = torch.randn(24)
    module.v = nn.Parameter(flat[:16].view(4, 4))
    module.a.weight = nn.Parameter(flat[8:].view(4, 4))


@pytest.mark.parametrize("keep", [as_buffer, as_attribute, as_row, as_overlap], ids=lambda one: one.__name__)
def test_shared_memory_is_refused(keep: Callable[[Alias], None]) -> None:
    with pytest.raises(WeftError, match="share memory"):
        weft.capture(Alias(keep), (torch.randn(8, 4),))


def test_neighbours_in_one_memory_are_no_aliases() -> None:
    def keep(module: Alias) -> None:
        both = torch.randn(4, 8)
        module.v, module.a.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
        module.register_buffer("low", module.v.detach().clone())
        module.register_buffer("high", module.low[1:])

    assert weft.verify(Alias(keep), (torch.randn(8, 4),), plan="dp=2").equal


class Several(Base):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return self.wrap(y.abs().mean(), y.square().mean())


class Named(NamedTuple):
    kl: Tensor
    loss: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda kl, loss: {"kl": kl, "loss": loss},
        Named,
        lambda kl, loss: (kl.detach(), loss),
        lambda kl, loss: (kl.expand(3), [loss]),
    ],
    ids=["dict", "namedtuple", "the only one with a gradient", "the only scalar"],
)
def test_the_loss_is_the_named_one_or_the_only_one(wrap: Callable[..., Any]) -> None:
    graph = weft.capture(Several(wrap), (torch.randn(8, 4),))
    assert graph.loss is not None and "square" in graph.producers[graph.loss].inputs[0]


def test_of_several_scalars_none_is_the_loss() -> None:
    def both(kl: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        return kl, loss

    module, x = Several(both), torch.randn(8, 4)
    with pytest.raises(WeftError, match="2 scalars, none of which is called loss"):
        weft.verify(module, (x,), plan="dp=2")
    parallel = weft.parallelize(module, (x,), plan="dp=2", emulate=True, cache=None)
    kl, loss = parallel(x)
    assert torch.allclose(kl + loss, sum(module(x)))
    with pytest.raises(WeftError, match="no output is called loss"):
        parallel.train_step((x,), torch.optim.SGD(parallel.parameters(), 0.1))  # type: ignore[operator]


ROWS = {number: [number, str(number)] for number in range(200)}
NESTED: dict[str, Any] = {"a": ([1],), "count": itertools.count(3)}


def test_what_is_not_touched_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold much that no forward touches: no fingerprints are taken of it."""
    seen = []

    def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(value)
        return fingerprint(value, *args, **kwargs)

    monkeypatch.setattr(surroundings, "fingerprint", counting)
    weft.capture(Base(), torch.ones(2, 4))
    assert not seen


@pytest.mark.parametrize(
    "change",
    [
        lambda: ROWS[3].append("4"),
        lambda: ROWS.pop(3),
        lambda: ROWS.update({3: [3, "4"]}),
        lambda: NESTED["a"][0].append(2),
        lambda: next(NESTED["count"]),
    ],
)
def test_changes_inside_containers_are_seen_and_put_back(change: Callable[[], Any]) -> None:
    before, around = copy.deepcopy((ROWS, NESTED)), surroundings.Surroundings(Base())
    assert around.changed() is None and not around.filled()
    change()
    found, filled = around.changed(), around.filled()
    assert found is not None and any(name in found[0] for name in ("ROWS", "NESTED"))
    assert len(filled) == 1
    around.restore()
    count = NESTED["count"]
    NESTED["count"] = before[1]["count"]  # which cannot be set back
    assert (ROWS, repr(NESTED)) == (before[0], repr(before[1]))
    assert around.again().changed() is None
    NESTED["count"] = count


def test_equal_values_in_place_of_others_are_no_change() -> None:
    around = surroundings.Surroundings(Base())
    ROWS[3] = list(ROWS[3])
    NESTED["a"] = copy.deepcopy(NESTED["a"])
    assert around.changed() is None and not around.filled()


@pytest.mark.parametrize(
    ("before", "after"),
    [([1, 2], [1, True]), ([0.0], [-0.0]), ([1, 2.0], [1, 2]), ({1: 2}, {1: 2.0}), ([[1], "a"], [["1"], "a"])],
)
def test_containers_of_other_values_differ(before: Any, after: Any) -> None:
    assert fingerprint(before) != fingerprint(after)
    assert fingerprint(before) == fingerprint(copy.deepcopy(before))
    assert fingerprint([math.nan]) == fingerprint([math.nan])


class Tasks(nn.Module):
    """Takes turns in a way that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4) for name in "uv"})
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.ones(4))
        self.tasks, self.shifts = itertools.cycle("uv"), itertools.cycle(["first", "second"])


class OfWeights(Tasks):
    def forward(self, x: Tensor) -> Tensor:
        return self.heads[next(self.tasks)](x).square().mean()


class OfBuffers(Tasks):
    def forward(self, x: Tensor) -> Tensor:
        return (self.heads["u"](x) + self.get_buffer(next(self.shifts))).square().mean()


@pytest.mark.parametrize("kind", [OfWeights, OfBuffers])
def test_a_second_forward_with_other_weights_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="a second forward does something else here") as told:
        weft.capture(kind(), torch.ones(2, 4))
    assert "test_outside.py" in told.value.place


WEIGHTS = torch.zeros(2, requires_grad=True)
PROMPT = nn.Parameter(torch.zeros(2))
CRITIC = [nn.Linear(1, 2).requires_grad_(True)]
FOREIGN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "a tensor": (lambda: torch.exp(WEIGHTS), r"exp\(WEIGHTS"),
    "a parameter": (lambda: torch.exp(PROMPT), r"exp\(PROMPT"),
    "a module in a list": (lambda: CRITIC[0](torch.ones(1, 1)), r"CRITIC\[0\]"),
}
DETACHED: dict[str, Callable[[], Tensor]] = {
    "a tensor": lambda: WEIGHTS.detach().exp(),
    "a parameter": lambda: PROMPT.detach().exp(),
    "detached later": lambda: (PROMPT * 2).detach().exp(),
    "its shape": lambda: torch.ones(PROMPT.shape),
    "without gradients": lambda: torch.no_grad()(CRITIC[0])(torch.ones(1, 1)),
}


class Weighed(nn.Module):
    """Uses what is no parameter."""

    def __init__(self, weights: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 4), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * self.weights().sum()


@pytest.mark.parametrize("what", FOREIGN)
def test_tensors_that_the_loop_trains_are_refused(what: str) -> None:
    weights, line = FOREIGN[what]
    with pytest.raises(CaptureError, match=rf"requires a gradient and is no parameter(.|\n)*{line}"):
        weft.capture(Weighed(weights), torch.ones(2, 4))


@pytest.mark.parametrize("what", DETACHED)
def test_the_values_of_such_tensors_may_be_used(what: str) -> None:
    assert weft.verify(Weighed(DETACHED[what]), (torch.ones(2, 4),), plan="dp=2").equal
