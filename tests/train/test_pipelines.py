"""Plans in stages and micro-batches, trained through every door: the same numbers as micro-batches on one device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parts import parts
from tests.train.eager import STEPS, adamw, check_same, gpt, mlp
from tests.train.test_torchrun import launch
from weft.compile.model_file import load_model_file
from weft.errors import PlanError, RunError
from weft.runtime.random import Stream
from weft.runtime.training.microbatches import split_arguments
from weft.train.command import train_file
from weft.train.data import Own
from weft.train.settings import Settings
from weft.verify.draw_mode import DrawMode

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, TIED = str(EXAMPLES / "mlp.py"), str(EXAMPLES / "gpt.py")


def accumulate(module: nn.Module, batch: Any, count: int, step: int, first: int = 0) -> float:
    """The gradients of a step in equal micro-batches, and its loss."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    total = 0.0
    for micro, (mine, named) in enumerate(split_arguments(args, dict(kwargs), None, count)[0]):
        with DrawMode(Stream(0, step, first + micro)):
            loss = module(*mine, **named) / count
        loss.backward()
        total += loss.item()
    return total


def train_eager(module: nn.Module, batch: Any, count: int) -> tuple[list[float], dict[str, Tensor]]:
    module = copy.deepcopy(module)
    optimizer = adamw(module)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        losses.append(accumulate(module, batch, count, step))
        optimizer.step()
    return losses, dict(module.state_dict())


@pytest.mark.parametrize(
    "plan", ["pp=2,microbatches=4", "pp=2,microbatches=4,virtual=2,schedule=interleaved", "dp=2,microbatches=2"]
)
def test_the_emulator_trains_as_one_device(plan: str) -> None:
    # tied weights: in two pieces, on two ranks or on one
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, plan, emulate=True, cache=None)
    optimizer = adamw(parallel)
    losses = [parallel.train_step(batch, optimizer).item() for _ in range(STEPS)]
    count = 2 if "dp" in plan else 4
    check_same((losses, parallel.state_dict()), train_eager(module, batch, count))


@pytest.mark.full
def test_two_processes_train_as_one_and_evaluate(tmp_path: Path) -> None:
    done = launch(tmp_path / "result", "pieces")
    assert done.returncode == 0, done.stderr
    module, batch = mlp()
    wanted = train_eager(module, batch, 4)
    found = [torch.load(tmp_path / f"result{rank}", weights_only=True) for rank in (0, 1)]
    (losses, first, evaluated), (again, second, evaluated_again) = found
    assert losses == again and evaluated == evaluated_again
    # every rank lists every parameter, those of other ranks as empty ones
    first, second = ({name: one for name, one in held.items() if one.numel()} for held in (first, second))
    assert first and not first.keys() & second.keys()
    check_same((losses, {name: {**first, **second}[name] for name in wanted[1]}), wanted)
    module.load_state_dict(wanted[1])
    few = {name: tensor[:5] for name, tensor in batch.items()}
    assert evaluated == pytest.approx(module.eval()(**few).item(), rel=1e-11)


def test_gradients_add_up_and_are_clipped_once() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "pp=2,microbatches=2,virtual=2", emulate=True, cache=None)
    for step in range(2):
        parallel.forward_backward(batch)
        accumulate(module, batch, 2, step)
    norm = weft.clip_grad_norm_(parallel, 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    adamw(parallel).step()
    adamw(module).step()
    for name, tensor in parallel.state_dict().items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-11, atol=1e-12)


def test_a_rank_holds_its_pieces_under_the_original_names() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "pp=2,microbatches=2", emulate=True, cache=None)
    whole = dict(module.named_parameters())
    held = [{name: one for name, one in rank.named_parameters() if one.numel()} for rank in parallel.ranks]
    assert {name for one in held for name in one} == whole.keys()
    shared = held[0].keys() & held[1].keys()
    assert len(shared) == 1 and all(len(one) < len(whole) for one in held)  # the tied one
    for one in held:
        for name, parameter in one.items():
            torch.testing.assert_close(parts(parameter), whole[name], rtol=0, atol=0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    parallel.load_state_dict(other.state_dict())
    torch.testing.assert_close(parallel.state_dict(), dict(other.state_dict()), rtol=0, atol=0)


def test_what_a_model_in_pieces_cannot_do_is_refused() -> None:
    module, batch = mlp()
    parallel = weft.parallelize(module, batch, "pp=2,microbatches=2", emulate=True, cache=None)
    with pytest.raises(RunError, match=r"(?s)no forward of its own.*train_step"):
        parallel(**batch)
    with torch.no_grad(), pytest.raises(RunError, match="under no_grad"):
        parallel.forward_backward(batch)
    with pytest.raises(RunError, match="in the example it is"):
        parallel.forward_backward({name: tensor[:, :4] for name, tensor in batch.items()})
    with pytest.raises(RunError, match="no rows"):
        parallel.forward_backward({name: tensor[:0] for name, tensor in batch.items()})
    # and it is none the worse for it
    parallel.train_step(batch, adamw(parallel))
    with pytest.raises(PlanError, match="trains a loss"):
        weft.parallelize(module, batch, "pp=2,microbatches=2", emulate=True, cache=None, outputs="all")
    with pytest.raises(RunError, match="needs 2 processes"):
        weft.parallelize(module, batch, "pp=2,microbatches=2", cache=None)


class Returning(nn.Sequential):
    """A model that returns something of its logits."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(super().forward(x))


@pytest.mark.parametrize(
    ("what", "words", "instead"),
    [
        (lambda y: y.square().mean().reshape(1), r"\[1\]", lambda y: y.square().mean().reshape(1).squeeze()),
        (lambda y: (y.mean(), y.square().mean()), "2 scalars", lambda y: {"kl": y.mean(), "loss": y.square().mean()}),
        (lambda y: y, r"\[8, 3\]", lambda y: {"loss": y.square().mean(), "logits": y}),
    ],
    ids=["one element", "two scalars", "logits"],
)
def test_what_returns_no_loss_is_told_what_would_do(what: Any, words: str, instead: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    with pytest.raises(PlanError, match=f"trains a loss.*{words}") as caught:
        weft.parallelize(Returning(what), (x,), "pp=2,microbatches=2", emulate=True, cache=None)
    assert "squeeze" in caught.value.remedy or '{"loss": loss' in caught.value.remedy
    model = Returning(instead)
    parallel: Any = weft.parallelize(model, (x,), "pp=2,microbatches=2", emulate=True, cache=None)
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(x), model.eval()(x))


SIZES = """
import torch
from tests.models import MLP

def model():
    torch.manual_seed(0)
    return MLP(dropout=0.1).double()

def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, 6, generator=draw, dtype=torch.float64) for name in "xy"}

def example():
    return rows(8, 0)

def data():
    return [rows(8, 1), rows(5, 2), rows(8, 3), rows(2, 4)]

def eval_data():
    return [rows(8, 5), rows(4, 6)]

def reduction(x, y):
    return len(x) ** 2
"""


def test_the_command_trains_evaluates_saves_and_goes_on(tmp_path: Path) -> None:
    """Batches of other sizes, clipping, evaluation, a reduction of the file's own, in two runs."""
    path = tmp_path / "sizes.py"
    path.write_text(SIZES)
    subject = load_model_file(path)
    assert subject.data is not None and subject.eval_data is not None
    module, losses, evaluations = subject.model, list[float](), list[tuple[int, float]]()
    optimizer = subject.optimizer(list(module.parameters()))
    for step, batch in enumerate(subject.data()):
        optimizer.zero_grad(set_to_none=True)
        losses.append(weighed(module, batch, step))
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        if step in (1, 3):
            module.eval()
            found = [module(**one).item() for one in subject.eval_data()]
            evaluations.append((step + 1, sum(found) / len(found)))
            module.train()
    plan, folder = "pp=2,microbatches=4", str(tmp_path / "run")
    first = train_file(path, plan, Settings(steps=2, save=folder, clip=0.1, eval_every=2))
    rest = train_file(path, plan, Settings(steps=4, resume=folder, clip=0.1, eval_every=2))
    assert [*first.losses, *rest.losses] == pytest.approx(losses, rel=1e-9)
    for (step, found), (at, wanted) in zip([*first.evaluations, *rest.evaluations], evaluations, strict=True):
        assert step == at and found == pytest.approx(wanted, rel=1e-9)


def weighed(module: nn.Module, batch: Any, step: int) -> float:
    """The gradients of a step whose micro-batches count by the squares of their rows."""
    micros = [named for _, named in split_arguments((), batch, None, min(4, len(batch["x"])))[0]]
    total = sum(len(one["x"]) ** 2 for one in micros)
    found = 0.0
    for micro, one in enumerate(micros):
        with DrawMode(Stream(0, step, micro)):
            loss = module(**one) * (len(one["x"]) ** 2 / total)
        loss.backward()
        found += loss.item()
    return found


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("pp=2,microbatches=9", "8 rows cannot be cut into 9 micro-batches"),
        ("pp=2,microbatches=2,stages=nowhere", "no module 'nowhere'"),
        ("pp=40,microbatches=2", "a stage would have no work"),
        ("pp=2,microbatches=2,schedule=inference", "nothing would be trained"),
    ],
)
def test_plans_that_cannot_be_are_refused(plan: str, told: str, tmp_path: Path) -> None:
    module, batch = mlp()
    with pytest.raises(PlanError, match=told):
        weft.parallelize(module, batch, plan, emulate=True, cache=None)
    if "9" not in plan:
        with pytest.raises(PlanError, match=told):
            train_file(EXAMPLE, plan, Settings(steps=1, cache=str(tmp_path)))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({0: "B0 F0 F1 B1", 1: "F0 B0 F1 B1"}, "contradicts the data"),
        ({0: "F0 F1 B0", 1: "F0 B0 F1 B1"}, "never runs b"),
        ({0: "F0 F1 F2 B0 B1 B2", 1: "F0 B0 F1 B1 F2 B2"}, "there are 2 micro-batches"),
    ],
)
def test_orders_that_cannot_be_are_refused(rows: dict[int, str], told: str) -> None:
    module, batch = mlp()

    def plan(graph: weft.Graph) -> weft.Plan:
        ops = [op.name for op in graph.ops]
        made = weft.Plan(graph, 2).stage("first", ops[:2], [0]).stage("second", ops[2:], [1])
        return made.cut_batch(2).order(rows)

    with pytest.raises(PlanError, match=told):
        weft.parallelize(module, batch, plan, emulate=True, cache=None)


def test_replicas_draw_and_average() -> None:
    """Two replicas of two stages, each with its own random numbers; a tied weight's gradient is averaged once."""
    torch.manual_seed(0)
    subject = load_model_file(TIED)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        batches = [next(Own(subject).batches(replica, 2, step)) for replica in range(2)]
        found = [accumulate(subject.model, batch, 2, step, first=2 * at) for at, batch in enumerate(batches)]
        for parameter in subject.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
        losses.append(sum(found) / 2)
    trained = train_file(TIED, "pp=2,microbatches=2", Settings(steps=3, devices=4, lr=1e-3))
    assert trained.replicas == 2
    assert trained.losses == pytest.approx(losses, rel=1e-5)


def test_marked_dims_are_not_acted_upon_in_stages() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens)).square().mean()

    marked = weft.dynamic(torch.zeros(4, 6, dtype=torch.long), 0, 1)
    with pytest.warns(UserWarning, match=r"dim 1 of tokens is marked \(weft.dynamic\), which a plan in stages"):
        parallel = weft.parallelize(Words(), (marked,), "pp=2,microbatches=2", emulate=True, cache=None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step((marked[:3],), optimizer)
    with pytest.raises(
        RunError, match="other numbers of rows, and no other sizes: pad to those of the example"
    ) as told:
        parallel.train_step((marked[:, :5],), optimizer)
    assert "without pp and microbatches" in str(told.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = weft.dynamic(torch.zeros(4, 6, dtype=torch.long), 0)
        weft.parallelize(Words(), (rows,), "pp=2,microbatches=2", emulate=True, cache=None)
