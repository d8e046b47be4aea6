"""What a step of a pipeline takes and gives: evaluation, batches of any number of rows, reductions of losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.parts import parts
from weft.compile import compile_program
from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.errors import RunError
from weft.runtime.layout.index import take
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import files_of
from weft.runtime.random import Stream
from weft.runtime.training.microbatches import split_arguments
from weft.runtime.training.reduction import Reduction
from weft.train.opened import open_rank
from weft.verify.draw_mode import DrawMode

PLAN = "pp=2,microbatches=4"
VOCABULARY = 11


class Tagger(nn.Module):
    """Tied weights, dropout, running statistics; a loss, or without targets what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.dropout = nn.BatchNorm1d(12), nn.Dropout(0.2)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.words(tokens)
        x = x + self.down(self.dropout(F.gelu(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))))
        logits = F.linear(x, self.words.weight)
        if targets is None:
            return {"logits": logits, "best": logits.argmax(-1)}
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


def batch(rows: int, seed: int = 0, *, ignored: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, 6), generator=draw)
    targets = tokens.flip(1).clone()
    targets.flatten()[torch.randperm(targets.numel(), generator=draw)[:ignored]] = -100
    return {"tokens": tokens, "targets": targets}


def parallel_of(module: nn.Module, rows: int = 8, plan: str = PLAN, **settings: Any) -> Any:
    return weft.parallelize(copy.deepcopy(module), batch(rows), plan, emulate=True, cache=None, **settings)


Weigh = Callable[[dict[str, Tensor]], float]


def accumulate(
    module: nn.Module, given: dict[str, Tensor], step: int, *, count: int = 4, weigh: Weigh | None = None
) -> tuple[float, list[float]]:
    """One device: the loss of a step, and that of each micro-batch; gradients are left in the parameters."""
    rows = len(given["tokens"])
    micros = [one for _, one in split_arguments((), given, None, min(count, rows))[0]]
    weights = [float(len(one["tokens"])) if weigh is None else weigh(one) for one in micros]
    total, losses = 0.0, []
    for micro, one in enumerate(micros):
        with DrawMode(Stream(0, step, micro)):
            loss = module(**one)
        losses.append(loss.item())
        if weights[micro]:
            loss = loss * (weights[micro] / sum(weights))
            loss.backward()
            total += loss.item()
    return total, losses


def check_alike(parallel: Any, module: nn.Module) -> None:
    found, wanted = parallel.state_dict(), module.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("plan", [PLAN, "pp=2,tp=2,microbatches=2", "dp=2,microbatches=2"])
def test_evaluation_is_that_of_one_device(plan: str) -> None:
    module = made()
    parallel = parallel_of(module, plan=plan)
    parallel.train_step(batch(8), sgd(parallel))
    count = 4 if "microbatches=4" in plan else 2
    optimizer = sgd(module)
    accumulate(module, batch(8), 0, count=count)
    optimizer.step()
    parallel.eval()
    module.eval()
    for rows in (8, 5, 1):
        given = batch(rows, seed=1)
        loss = parallel(**given)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, module(**given).detach(), rtol=1e-12, atol=1e-12)
        wanted = module(tokens=given["tokens"])
        found = parallel(tokens=given["tokens"])
        torch.testing.assert_close(found["logits"], wanted["logits"].detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(found["best"], wanted["best"])
    # and training goes on as if nothing had been
    parallel.train()
    module.train()
    parallel.train_step(batch(8, 2), sgd(parallel))
    optimizer.zero_grad()
    accumulate(module, batch(8, 2), 1, count=count)
    optimizer.step()
    check_alike(parallel, module)


@pytest.mark.parametrize("plan", [PLAN, "pp=2,tp=2,microbatches=4,schedule=zb-h1", "dp=2,pp=2,microbatches=4"])
def test_batches_of_any_number_of_rows(plan: str) -> None:
    module = made()
    parallel = parallel_of(module, plan=plan)
    ours, theirs = sgd(parallel), sgd(module)
    for step, rows in enumerate((8, 7, 3, 1, 9, 8)):
        loss = parallel.train_step(batch(rows, step), ours)
        theirs.zero_grad()
        wanted, losses = accumulate(module, batch(rows, step), step)
        theirs.step()
        assert loss.item() == pytest.approx(wanted, rel=1e-12)
        assert [one.item() for one in parallel.losses] == pytest.approx(losses, rel=1e-12)
    check_alike(parallel, module)


def tokens_in(one: dict[str, Tensor]) -> float:
    return float((one["targets"] != -100).sum())


def first_word(one: dict[str, Tensor]) -> float:
    return 1.0 + float(one["tokens"][0, 0])


REDUCTIONS: list[tuple[Any, Weigh | None]] = [
    ("mean", None),
    (weft.per_token("targets"), tokens_in),
    (lambda tokens, targets: 1 + tokens[0, 0], first_word),
]


@pytest.mark.parametrize(("reduction", "weigh"), REDUCTIONS)
def test_losses_count_as_was_said(reduction: Any, weigh: Weigh | None) -> None:
    module = made()
    parallel = parallel_of(module, reduction=reduction)
    given = batch(8, ignored=9)
    if weigh is tokens_in:
        # the last micro-batch has no target: its loss is not a number, and counts nothing
        given["targets"][6:] = -100
    loss = parallel.train_step(given, sgd(parallel))
    wanted, losses = accumulate(module, given, 0, weigh=weigh)
    sgd(module).step()
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert [one.item() for one in parallel.losses] == pytest.approx(losses, rel=1e-12, nan_ok=True)
    check_alike(parallel, module)


def test_with_the_weights_of_its_own_mean_a_batch_may_be_cut_or_not() -> None:
    module = made().eval()
    given = batch(8, ignored=20)
    whole = module(**given)
    whole.backward()
    parallel = parallel_of(module, reduction=weft.per_token("targets"))
    assert parallel.forward_backward(given).item() == pytest.approx(whole.item(), rel=1e-12)
    summed = parallel_of(module, reduction="sum")
    assert summed.forward_backward(given).item() == pytest.approx(sum(one.item() for one in parallel.losses), rel=1e-12)
    wanted = {name: one.grad for name, one in module.named_parameters()}
    for rank in parallel.ranks:
        for name, one in rank.named_parameters():
            torch.testing.assert_close(parts(one.grad), take(wanted[name], rank.stored[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("reduction", "told"),
    [("median", "no reduction"), (weft.per_token("labels"), "no such tensor"), (lambda tokens, targets: -1, "weighs")],
)
def test_what_weighs_nothing_sensible_is_refused(reduction: Any, told: str) -> None:
    with pytest.raises(RunError, match=told):
        parallel_of(made(), reduction=reduction).forward_backward(batch(8))


@dataclass(frozen=True)
class Fed:
    """Replicas as threads, each fed its own batches."""

    plan: str
    replicas: int
    reduction: Reduction

    def train(self, module: nn.Module, steps: list[list[dict[str, Tensor] | None]]) -> list[tuple[list[float], Any]]:
        about = Subject(copy.deepcopy(module), batch(8))
        programs = Programs(lambda _: about, self.plan, None, cache=None, outputs="any")
        files = compile_program(copy.deepcopy(module), batch(8), self.plan).files

        def body(transport: Transport) -> tuple[list[float], Any]:
            rank = open_rank(files, transport, module, make_files=programs, reduction=self.reduction)
            optimizer = sgd(rank)
            losses = []
            for batches in steps:
                loss = rank.train_step(batches[rank.replica], optimizer)
                losses.append(rank.over_replicas(loss).item())
            state = dict(rank.state_dict())
            # replicas look at batches of different sizes
            loss = rank.eval()(**batch(8 if rank.replica or rank.has_forward else 3, rank.replica))
            return [*losses, rank.over_replicas(loss).item()], state

        return run_ranks(files_of(files).devices * self.replicas, body)


@pytest.mark.parametrize("reduction", ["mean", "sum", weft.per_token("targets")])
def test_replicas_with_different_batches_are_one_device_with_all(reduction: Any) -> None:
    """Fewer rows, more rows, none at all: every row, or token, of all replicas counts alike."""
    module = made()
    module.norm = nn.Identity()  # running statistics are each replica's own
    steps: list[list[dict[str, Tensor] | None]] = [
        [batch(8, 1, ignored=4), batch(8, 2)],
        [batch(8, 3), batch(3, 4, ignored=7)],
        [batch(1, 5), None],
        [None, batch(5, 6)],
        [batch(8, 7), batch(8, 8)],
    ]
    found = Fed(PLAN, 2, Reduction(reduction)).train(module, steps)
    optimizer, wanted = sgd(module), list[float]()
    weigh = (lambda one: 1.0) if reduction == "sum" else tokens_in if callable(reduction) else None
    for step, batches in enumerate(steps):
        optimizer.zero_grad()
        wanted.append(all_replicas(module, batches, step, weigh, sums=reduction == "sum"))
        optimizer.step()
    module.eval()
    wanted.append(all_replicas(module, [batch(3, 0), batch(8, 1)], 9, weigh, sums=reduction == "sum"))
    for losses, state in found:
        assert losses == pytest.approx(wanted, rel=1e-12)
        for name, tensor in state.items():
            if tensor.numel():
                torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", weft.per_token("targets")])
def test_replicas_of_a_whole_program_count_as_was_said(reduction: Any) -> None:
    module = made()
    module.norm = nn.Identity()
    steps: list[list[dict[str, Tensor] | None]] = [
        [batch(8, 1, ignored=40), batch(8, 2)],
        [batch(8, 3), batch(8, 4, ignored=7)],
    ]
    found = Fed("dp=2", 2, Reduction(reduction)).train(module, steps)
    optimizer, wanted = sgd(module), list[float]()
    weigh = tokens_in if callable(reduction) else None
    for step, batches in enumerate(steps):
        optimizer.zero_grad()
        wanted.append(all_replicas(module, batches, step, weigh, sums=reduction == "sum", count=1))
        optimizer.step()
    module.eval()
    wanted.append(all_replicas(module, [batch(8, 0), batch(8, 1)], 9, weigh, sums=reduction == "sum", count=1))
    for losses, state in found:
        assert losses == pytest.approx(wanted, rel=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-11, atol=1e-12)


def all_replicas(
    module: nn.Module,
    batches: list[dict[str, Tensor] | None],
    step: int,
    weigh: Weigh | None,
    *,
    sums: bool,
    count: int = 4,
) -> float:
    """One device with the micro-batches of all replicas."""
    micros: list[tuple[int, dict[str, Tensor]]] = []
    for replica, one in enumerate(batches):
        if one is not None:
            parts = split_arguments((), one, None, min(count, len(one["tokens"])))[0]
            micros += [(count * replica + number, part) for number, (_, part) in enumerate(parts)]
    weights = [float(len(one["tokens"])) if weigh is None else weigh(one) for _, one in micros]
    total = 0.0
    for (number, one), weight in zip(micros, weights, strict=True):
        with DrawMode(Stream(0, step, number)):
            loss = module(**one) * (1 if sums else weight / sum(weights))
        loss.backward()
        total += loss.item()
    return total


def test_a_micro_batch_with_ignored_labels_alone_is_warned_of() -> None:
    tokens, targets = torch.randint(0, VOCABULARY, (2, 8, 5))
    batch = {"tokens": tokens, "targets": targets}
    parallel = weft.parallelize(Tagger().double(), batch, PLAN, emulate=True, cache=None)
    parallel.forward_backward(batch)
    empty = {"tokens": tokens, "targets": targets.clone()}
    empty["targets"][2:4] = -100
    with pytest.warns(UserWarning, match=r"micro-batch 1 of 4 is not a number.*per_token") as caught:
        parallel.forward_backward(empty)
    assert len(caught) == 1
    # once
    parallel.forward_backward(empty)
