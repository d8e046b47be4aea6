"""Recomputation, loops and frees: the same numbers, less memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.scripting import F64, STREAM, all_reduce, box, close, load, reshard, run, script, sync
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.script import Free, Give, Instruction, Local, Loop, Region, Run, Script, Take
from weft.runtime.transport import RankFailed, Transport


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators of this thread made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in known and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def measure(scripts: list[Script], state: list[dict[str, Tensor]], trace: Any = None) -> list[tuple[Any, Any, int]]:
    def body(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        rank = Rank(scripts[transport.rank], transport, state=state[transport.rank], trace=trace)
        with Memory() as memory:
            outputs = rank.forward({}, STREAM)
            gradients = rank.backward()
        return outputs, gradients, memory.peak

    return run_ranks(len(scripts), body, timeout=20)


def chain(source: str, *, slot: int = 0, width: int = 5) -> list[Instruction]:
    """Several large values in a row, the last one y; nothing is freed before it."""
    steps: list[Instruction] = []
    for i in range(width):
        steps.append(run("aten.sin.default", Local(source, slot), out=Local(f"v{i}", slot)))
        source = f"v{i}"
    return [*steps, run("aten.mul.Tensor", Local(source, slot), Local("v0", slot), out=Local("y", slot))]


def head(source: str) -> list[Instruction]:
    return [run("aten.mul.Tensor", source, source, out="sq"), run("aten.sum.default", "sq", out="loss")]


def opening() -> list[Instruction]:
    return [
        load("x", "x", leaf=False),
        load("w", "w"),
        run("aten.mul.Tensor", "x", "w", out="h"),
        Free(("x",)),
    ]


def one(instructions: list[Instruction], **settings: Any) -> list[Script]:
    settings.setdefault("outputs", {"loss": "loss"})
    return [script(0, 1, instructions, [sync("w", (64, 8))], **settings)]


X, W = randn(64, 8), randn(64, 8, seed=1)
STATE = [{"x": X, "w": W}]


def plain() -> list[Script]:
    return one([*opening(), *chain("h"), *head("y")])


def chunked(num: int, *, recompute: bool, param: bool = False, add: bool = False) -> list[Script]:
    """The chain in chunks of rows; with `param` the parameter is taken inside; with `add` partial sums are given."""
    rows, bodies = 64 // num, []
    for i in range(num):
        index = box((i * rows, i * rows + rows), (0, 8))
        body: list[Instruction] = [Take("x" if param else "h", Local("t", i), index, (rows, 8))]
        if param:
            body += [Take("w", Local("wt", i), index, (rows, 8))]
            body += [run("aten.mul.Tensor", Local("t", i), Local("wt", i), out=Local("p", i))]
        body += chain("p" if param else "t", slot=i)
        if add:
            body += [run("aten.mul.Tensor", Local("y", i), Local("y", i), out=Local("s", i))]
            body += [run("aten.sum.default", Local("s", i), out=Local("part", i))]
            body += [Give(Local("part", i), "loss", None, ())]
        else:
            body += [Give(Local("y", i), "all", index, (64, 8))]
        bodies.append(tuple(body))
    loop = Loop(tuple(bodies), recompute, ("loss" if add else "all",))
    first = opening()[:2] if param else opening()
    return one([*first, loop, *([] if add else head("all"))])


def same(found: tuple[Any, Any, int], want: tuple[Any, Any, int]) -> None:
    close(found[0]["loss"], want[0]["loss"])
    close(found[1]["w"], want[1]["w"])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("param", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_loop_equals_plain(recompute: bool, param: bool, add: bool) -> None:
    leaf = W.clone().requires_grad_()
    h = X * leaf
    v = [h.sin()]
    for _ in range(4):
        v.append(v[-1].sin())
    (v[-1] * v[0]).square().sum().backward()
    (found,) = measure(chunked(4, recompute=recompute, param=param, add=add), STATE)
    close(found[1]["w"], leaf.grad)
    same(found, measure(plain(), STATE)[0])


def test_recomputed_chunks_save_memory() -> None:
    """Ten values of one size live at once uncut; by eight chunks the chain adds about an eighth of that."""
    whole, chunks = measure(plain(), STATE)[0][2], measure(chunked(8, recompute=False), STATE)[0][2]
    recomputed = measure(chunked(8, recompute=True), STATE)[0][2]
    unit = X.nbytes
    assert whole > 8 * unit and chunks > 6 * unit
    # input, output, their gradients, and the square of the head stay whole
    assert recomputed < 4.5 * unit, recomputed / unit


def test_chunks_of_a_parameter_make_no_whole_gradients() -> None:
    unit = X.nbytes
    recomputed = measure(chunked(8, recompute=True, param=True, add=True), STATE)[0][2]
    assert recomputed < 2.5 * unit, recomputed / unit


def test_regions_save_memory() -> None:
    def scripts(regions: bool) -> list[Script]:
        steps, source = opening(), "h"
        for i in range(6):
            body: list[Instruction] = chain(source)
            body[-1] = run("aten.mul.Tensor", "v4", "v0", out=f"y{i}")
            steps += [Region(tuple(body), (f"y{i}",))] if regions else body
            steps += [Free((source, *(() if regions else ("v0", "v1", "v2", "v3", "v4"))))]
            source = f"y{i}"
        return one([*steps, *head(source)])

    (found,), (want,) = measure(scripts(True), STATE), measure(scripts(False), STATE)
    same(found, want)
    assert found[2] < 0.6 * want[2], (found[2], want[2])


def test_region_in_region_with_odd_outputs() -> None:
    """Several outputs, one of them unused, one of integers; a region inside a region; traced once."""
    seen: list[str] = []
    inner = Region(tuple(chain("h")), ("y", "v0"))
    ids = Run("aten.argmax.default", (Local("y"), 1), (), (Local("ids"),), "argmax", "")
    picked = run("aten.mul.Tensor", "y", "ids2", out="out")
    outer = Region((inner, ids, run("aten.cos.default", "v0", out="unused")), ("y", "ids", "unused"))
    after = [run("aten.unsqueeze.default", "ids", 1, out="ids2"), picked, *head("out")]
    (found,) = measure(one([*opening(), outer, *after]), STATE, lambda op, *rest: seen.append(op))
    (want,) = measure(one([*opening(), *chain("h"), ids, *after]), STATE)
    same(found, want)
    assert seen.count("argmax") == 1 and seen.count("aten.sin.default") == 5


def test_leaf_made_inside_a_region() -> None:
    body = (load("w", "w"), run("aten.mul.Tensor", "x", "w", out="h"), *chain("h"))
    scripts = one([load("x", "x", leaf=False), Region(body, ("y",)), *head("y")])
    same(measure(scripts, STATE)[0], measure(plain(), STATE)[0])


def test_leaf_made_in_every_body_of_a_loop() -> None:
    index = [box((i * 32, i * 32 + 32), (0, 8)) for i in range(2)]
    for recompute in (False, True):
        bodies = tuple(
            (
                load("w", "w"),
                Take("x", Local("t", i), index[i], (32, 8)),
                Take("w", Local("wt", i), index[i], (32, 8)),
                run("aten.mul.Tensor", Local("t", i), Local("wt", i), out=Local("h", i)),
                *chain("h", slot=i),
                Give(Local("y", i), "all", index[i], (64, 8)),
            )
            for i in range(2)
        )
        scripts = one([load("x", "x", leaf=False), Loop(bodies, recompute, ("all",)), *head("all")])
        same(measure(scripts, STATE)[0], measure(plain(), STATE)[0])


def test_take_of_zeros_and_multi_range_gives() -> None:
    """Bodies may get zeros in place of a part, and place what they make in several intervals."""
    index = ((((0, 2), (6, 8)), ((0, 3),)), (((2, 6),), ((0, 3),)))
    v = randn(8, 3)

    def scripts(recompute: bool) -> Script:
        bodies = tuple(
            (
                Take("v", Local("t", i), index[i], (4, 3)),
                Take("b", Local("u", i), box((0, 1), (0, 3)) if i == 0 else None, (1, 3)),
                run("aten.mul.Tensor", Local("t", i), Local("t", i), out=Local("q", i)),
                run("aten.add.Tensor", Local("q", i), Local("u", i), out=Local("r", i)),
                Give(Local("r", i), "all", index[i], (8, 3)),
            )
            for i in range(2)
        )
        steps = [load("v", "v"), load("b", "b"), Loop(bodies, recompute, ("all",)), *head("all")]
        return script(0, 1, steps, [sync("v", (8, 3)), sync("b", (1, 3))], outputs={"all": "all"})

    b = randn(1, 3, seed=2)
    leaf, bias = v.clone().requires_grad_(), b.clone().requires_grad_()
    mask = torch.tensor([1, 1, 0, 0, 0, 0, 1, 1], dtype=F64).unsqueeze(1)
    want = leaf * leaf + mask * bias
    want.square().sum().backward()
    for recompute in (False, True):
        (found,) = measure([scripts(recompute)], [{"v": v, "b": b}])
        close(found[0]["all"], want.detach())
        close(found[1]["v"], leaf.grad)
        close(found[1]["b"], bias.grad)


def test_collectives_inside_regions_and_loops() -> None:
    """f and g inside recomputed bodies; rank 1 reads nothing that needs a gradient and drops the result."""
    x, w1, w2 = randn(4, 6), randn(8, 6, seed=1), randn(6, 8, seed=2)

    def block(source: str, slot: int, rows: int) -> list[Instruction]:
        at = f"{slot}"
        return [
            reshard(source, "xf" + at, [], [all_reduce((rows, 6), 0, 1)], (((rows, 6),), ((rows, 6),))),
            run("aten.linear.default", "xf" + at, "w1", out="a"),
            run("aten.gelu.default", "a", out="b"),
            run("aten.linear.default", "b", "w2", out="p"),
            reshard("p", "y" + at, [all_reduce((rows, 6), 0, 1)], [], (((rows, 6),), ((rows, 6),))),
        ]

    def scripted(rank: int, nested: bool) -> Script:
        bodies = tuple(
            (
                Take("z", Local("t"), box((2 * i, 2 * i + 2), (0, 6)), (2, 6)),
                *([Region(tuple(block("t", i, 2)), (f"y{i}",))] if nested else block("t", i, 2)),
                Give(Local(f"y{i}"), "out", box((2 * i, 2 * i + 2), (0, 6)), (4, 6)),
            )
            for i in range(2)
        )
        steps = [
            load("x", "x", leaf=False),
            load("w1", "w1"),
            load("w2", "w2"),
            Region(tuple(block("x", 9, 4)), ("y9",)),
            run("aten.add.Tensor", "y9", "x", out="z"),
            Loop(bodies, True, ("out",)),
            *(head("out") if rank == 0 else []),
        ]
        # rank 1 starts from nothing: its tokens alone bring it through backward
        return script(rank, 2, steps, [sync("w1", (4, 6)), sync("w2", (6, 4))], loss="loss" if rank == 0 else None)

    a, b = w1.clone().requires_grad_(), w2.clone().requires_grad_()

    def eager_block(z: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(z, a)), b)

    eager_block(eager_block(x) + x).square().sum().backward()
    state = [{"x": x, "w1": w1[r * 4 : r * 4 + 4], "w2": w2[:, r * 4 : r * 4 + 4]} for r in range(2)]
    for nested in (False, True):
        scripts = [scripted(r, nested) for r in range(2)]
        # g has no backward collective: rank 1 must get its gradient from the loss as well, so it is a copy there
        scripts[1] = script(1, 2, [*scripts[1].instructions, *head("out")], scripts[1].syncs)
        results = measure(scripts, state)
        for r in range(2):
            close(results[r][1]["w1"], a.grad[r * 4 : r * 4 + 4])
            close(results[r][1]["w2"], b.grad[:, r * 4 : r * 4 + 4])


def test_a_region_without_gradients_on_one_rank_takes_part() -> None:
    """The region's only collective sums a gradient; rank 1 reads no value that needs one and uses no result."""
    w = randn(2, 3)

    def scripted(rank: int) -> Script:
        both = reshard("h", "s", [all_reduce((2, 3), 0, 1)], [all_reduce((2, 3), 0, 1)], (((2, 3),), ((2, 3),)))
        region = Region((run("aten.sin.default", "w", out="h"), both), ("s",))
        steps = [load("w", "w", leaf=rank == 0), region, *(head("s") if rank == 0 else [])]
        return script(rank, 2, steps, [sync("w", (2, 3))] if rank == 0 else [], loss="loss" if rank == 0 else None)

    results = measure([scripted(0), scripted(1)], [{"w": w}, {"w": 2 * w}])
    leaf = w.clone().requires_grad_()
    (leaf.sin() + (2 * w).sin()).square().sum().backward()
    close(results[0][1]["w"], leaf.grad)
    assert results[1][1] == {}


def test_updates_are_made_once_and_runs_repeat() -> None:
    """A buffer's new content leaves the region; thirty steps give the same bits."""
    body = (
        run("aten.mul.Tensor", "x", "w", out="h"),
        run("aten.mean.dim", "h", [0], out="m"),
        run("aten.add.Tensor", "count", "m", out="new", grad=False),
    )
    steps = [load("x", "x", leaf=False), load("w", "w"), load("count", "count", leaf=False)]
    steps += [Region(body, ("h", "new")), *head("h")]
    scripted = one(steps, updates={"count": "new"})[0]
    state = {"x": X, "w": W, "count": torch.ones(8, dtype=F64)}

    def body_(transport: Transport) -> list[Tensor]:
        rank = Rank(scripted, transport, state=state)
        rank.forward({}, STREAM)
        before = rank.updates()["count"].clone()
        gradient = rank.backward()["w"]
        assert torch.equal(rank.updates()["count"], before)
        return [before, gradient]

    first = run_ranks(1, body_)[0]
    close(first[0], 1 + (X * W).mean(0))
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, run_ranks(1, body_)[0], strict=True))


def test_free_lets_memory_fall() -> None:
    def peak(free: bool) -> int:
        steps: list[Instruction] = [load("x0", "x", leaf=False)]
        for i in range(12):
            steps.append(run("aten.sin.default", f"x{i}", out=f"x{i + 1}"))
            steps += [Free((f"x{i}",))] if free else []
        return measure([script(0, 1, [*steps, *head("x12")])], [{"x": X}])[0][2]

    assert peak(False) > 12 * X.nbytes > 4 * X.nbytes > peak(True)


def test_two_leaves_whose_gradients_share_memory() -> None:
    """torch hands both views of one gradient; loops add to each of them several times."""
    a, b = randn(2, 2), randn(2, 2, seed=1)
    body = (
        run("aten.view.default", "a", [4], out="flat_a"),
        run("aten.view.default", "b", [4], out="flat_b"),
        run("aten.add.Tensor", "flat_a", "flat_b", out="s"),
        run("aten.mul.Tensor", "s", 2.0, out="t"),
        Give(Local("t"), "sum", None, (4,)),
    )
    steps = [
        load("a", "a"),
        load("b", "b"),
        Loop((body,) * 3, True, ("sum",)),
        run("aten.sum.default", "sum", out="loss"),
    ]
    (found,) = measure([script(0, 1, steps, [sync("a", (2, 2)), sync("b", (2, 2))])], [{"a": a, "b": b}])
    for name in "ab":
        assert found[1][name].tolist() == [[6.0, 6.0]] * 2
    once = [load("a", "a"), load("b", "b"), *body[:4], run("aten.sum.default", "t", out="loss")]
    (found,) = measure([script(0, 1, once, [sync("a", (2, 2)), sync("b", (2, 2))])], [{"a": a, "b": b}])
    assert found[1]["a"].data_ptr() != found[1]["b"].data_ptr()


def test_errors_name_op_and_line() -> None:
    for wrap in (lambda body: body, lambda body: [Region(tuple(body), ("y",))]):
        wrong = [run("aten.mm.default", "x", "w", out="y", op="block.0/mm", place="model.py:12  y = x @ w")]
        scripts = one([load("x", "x", leaf=False), load("w", "w"), *wrap(wrong), *head("y")])
        with pytest.raises(RankFailed, match=r"rank 0 failed in block.0/mm at model.py:12  y = x @ w"):
            measure(scripts, STATE)


def test_what_needs_no_gradient_inside_needs_none_outside() -> None:
    """A mask made in a region, and a value made without grad mode, are constants to the ops after it."""
    needed: dict[str, bool] = {}

    def look(name: str) -> Run:
        def note(tensor: Tensor) -> Tensor:
            needed[name] = tensor.requires_grad
            return tensor * 1

        return Run("", (Local(name),), (), (Local(f"{name}_seen"),), name, "", function=note)

    mask = run("aten.cos.default", "x", out="mask")
    frozen = run("aten.sin.default", "h", out="frozen", grad=False)
    inner = Region((frozen, run("aten.sin.default", "h", out="free")), ("frozen", "free"))
    steps = [load("x", "x", leaf=False), load("w", "w"), run("aten.mul.Tensor", "x", "w", out="h")]
    steps += [Region((mask, inner), ("mask", "frozen", "free")), *map(look, ("mask", "frozen", "free"))]
    steps += [
        run("aten.mul.Tensor", "frozen_seen", "mask_seen", out="a"),
        run("aten.mul.Tensor", "a", "free_seen", out="y"),
    ]
    (found,) = measure(one([*steps, *head("y")]), STATE)
    assert needed == {"mask": False, "frozen": False, "free": True}
    leaf = W.clone().requires_grad_()
    h = X * leaf
    (h.sin().detach() * X.cos() * h.sin()).square().sum().backward()
    close(found[1]["w"], leaf.grad)
