"""What a call returns: what the original returns, in training and in evaluation, with right gradients."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.errors import RunError


@dataclass
class Found:
    """A structure of the user's."""

    loss: Tensor
    logits: Tensor
    features: tuple[Tensor, ...]


class Classifier(nn.Module):
    """A norm with statistics, dropout that is off, and one of several forms of what is returned."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = torch.relu(self.norm(self.up(x)))
        logits = self.down(hidden)
        if y is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits, y)
        if self.form == "tuple":
            return loss, logits
        if self.form == "class":
            return Found(loss, logits, (hidden,))
        return {"loss": loss, "logits": logits, "hidden": hidden, "note": 3}


def model(form: str = "dict") -> Classifier:
    torch.manual_seed(0)
    return Classifier(form).double()


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, generator=generator, dtype=torch.float64),
        "y": torch.randint(4, (8,), generator=generator),
    }


def made(plan: str, form: str = "dict", **settings: Any) -> Any:
    return weft.parallelize(model(form), batch(), plan, emulate=True, cache=None, **settings)


def loss_of(found: Any) -> Tensor:
    if isinstance(found, tuple):
        return found[0]
    return found["loss"] if isinstance(found, dict) else found.loss


def compare(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Found):
        found, expected = vars(found), vars(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("plan", "form"), [("dp=1", "dict"), ("dp=2", "tuple"), ("tp=2", "class"), ("dp=2,zero=3", "dict")]
)
def test_a_call_returns_what_the_original_does(plan: str, form: str) -> None:
    eager, parallel = model(form), made(plan, form)
    theirs, ours = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (eager, parallel))
    for step in range(4):
        expected = eager(**batch(step))
        if step == 2:
            # a step that needs the loss alone, between calls
            found = parallel.train_step(batch(step), ours)
            theirs.zero_grad()
            loss_of(expected).backward()
            theirs.step()
            assert found.dim() == 0 and found.item() == pytest.approx(loss_of(expected).item(), rel=1e-12)
            continue
        found = parallel(**batch(step))
        compare(found, expected)
        for optimizer, output in ((theirs, expected), (ours, found)):
            optimizer.zero_grad()
            loss_of(output).backward()
            optimizer.step()
    for name, held in eager.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], held, rtol=1e-12, atol=1e-12)
    eager.eval(), parallel.eval()
    compare(parallel(**batch(9)), eager(**batch(9)))
    compare(parallel(x=batch(9)["x"]), eager(x=batch(9)["x"]))
    parallel.train()
    assert set(parallel(**batch())) >= {"loss", "logits"} if form == "dict" else True


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_gradients_through_any_output(plan: str) -> None:
    eager, parallel = model(), made(plan)
    expected = None
    for one in (eager, parallel):
        found = one(**batch())
        (found["loss"] + found["logits"].square().mean() + 0.1 * found["hidden"].sum()).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        expected, state = expected or one.state_dict(), one.state_dict()
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_a_pipeline_evaluates_to_what_the_original_returns() -> None:
    eager, parallel = model(), made("pp=2,microbatches=2")
    with pytest.raises(RunError, match="train_step"):
        parallel(**batch())
    parallel.train_step(batch(), torch.optim.SGD(parallel.parameters(), lr=0.0))
    eager.load_state_dict(parallel.state_dict())
    eager.eval(), parallel.eval()
    for rows in (8, 5):
        given = {name: one[:rows] for name, one in batch(3).items()}
        expected = eager(**given)
        compare(parallel(**given), {**expected, "loss": expected["loss"].detach()})


def test_the_loss_alone_if_it_is_asked_for() -> None:
    parallel = made("dp=2", outputs="loss")
    expected = model()(**batch())["loss"]
    found = parallel(**batch())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert parallel.eval()(**batch()).dim() == 0


def test_a_loss_alone_needs_no_other_program() -> None:
    class Bare(Classifier):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return super().forward(x, y)["loss"]

    torch.manual_seed(0)
    parallel: Any = weft.parallelize(Bare().double(), batch(), "dp=2", emulate=True, cache=None)
    parallel(**batch()).backward()
    parallel.train_step(batch(), torch.optim.SGD(parallel.parameters(), lr=0.1))
    assert not parallel.ranks[0]._others, "one program serves both"


def test_a_part_of_a_model_in_one_forward_with_a_step() -> None:
    """Both programs count the same steps, so draws are those of the step."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            kept = F.dropout(self.layer(x), 0.5)
            return {"loss": kept.square().mean(), "kept": kept}

    torch.manual_seed(0)
    net, x = Dropped().double(), batch()["x"]
    one = weft.parallelize(net, (x,), "dp=2", emulate=True, cache=None, seed=5)
    other = weft.parallelize(net, (x,), "dp=2", emulate=True, cache=None, seed=5)
    rest = torch.optim.SGD(other.parameters(), lr=0.0)
    for _ in range(3):
        found: Any = one(x)
        assert found["loss"].item() == pytest.approx(other.train_step((x,), rest).item(), rel=1e-12)
        assert (found["kept"] == 0).any()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_the_signature_and_calls_are_those_of_the_original(plan: str) -> None:
    net, given = model(), batch()
    wanted = inspect.signature(net.forward)
    parallel: Any = weft.parallelize(net, (given["x"], given["y"]), plan, emulate=plan != "dp=1", cache=None)
    assert inspect.signature(parallel.forward) == wanted
    expected = model()(**given)
    for found in (parallel(**given), parallel(given["x"], y=given["y"]), parallel(y=given["y"], x=given["x"])):
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-12, atol=1e-12)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found = parallel.train_step(given, optimizer)
    torch.testing.assert_close(found, expected["loss"].detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(RunError, match="another form"):
        parallel(given["x"])
    with pytest.raises(RunError, match="another form"):
        parallel(**given, z=given["x"])


def test_a_pipeline_takes_arguments_by_name() -> None:
    given = batch()
    parallel: Any = weft.parallelize(model(), (given["x"], given["y"]), "pp=2,microbatches=1", emulate=True, cache=None)
    found = parallel.train_step(given, torch.optim.SGD(parallel.parameters(), lr=0.1))
    torch.testing.assert_close(found, model()(**given)["loss"].detach(), rtol=1e-12, atol=1e-12)


def test_arguments_that_are_given_as_their_defaults() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: float = 2.0, **more: Any) -> Tensor:
            return (super().forward(x) * scale).sum()

    torch.manual_seed(0)
    net, x = Scaled(6, 3).double(), batch()["x"]
    parallel = weft.parallelize(net, (x,), "dp=2", emulate=True, cache=None)
    torch.testing.assert_close(parallel(x=x, scale=2.0), net(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(RunError, match="another form"):
        parallel(x, scale=3.0)


def test_keywords_of_no_parameter_have_the_order_of_the_example() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor, **more: Tensor) -> Tensor:
            found = [at * self.b(one) for at, one in enumerate(more.values(), 1)]
            return (self.a(x) * scale + torch.stack(found).sum(0)).square().mean()

    torch.manual_seed(0)
    net, x = Towers().double(), batch()["x"]
    given = {"x": x, "scale": x[:, :1], "text": x * 2, "image": x * 3}
    parallel: Any = weft.parallelize(net, given, "dp=2", emulate=True, cache=None)
    named = {name: given[name] for name in ("text", "scale", "image", "x")}
    for found in (parallel(**named), parallel(x, **{name: given[name] for name in ("text", "image", "scale")})):
        torch.testing.assert_close(found, net(**given), rtol=1e-12, atol=1e-12)
    other = {name: given[name] for name in ("x", "scale", "image", "text")}
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for call in (lambda: parallel(**other), lambda: parallel.train_step(other, optimizer)):
        with pytest.raises(
            RunError, match=r"\['image', 'text'\] have another order than in the example, \['text', 'im"
        ):
            call()


def test_flags_beside_what_is_returned() -> None:
    """A program for another flag is not taken for that of the example, and refusals stay those of the example."""

    class Flagged(nn.Linear):
        def forward(self, x: Tensor, double: bool = False) -> dict[str, Tensor]:
            y = super().forward(x) * (2 if double else 1)
            return {"loss": y.square().mean(), "y": y}

    torch.manual_seed(0)
    net, x = Flagged(6, 3).double(), batch()["x"]
    parallel: Any = weft.parallelize(net, (x, False), "dp=2", emulate=True, cache=None)
    for double in (True, False, True):
        torch.testing.assert_close(parallel(x, double)["y"], net(x, double)["y"], rtol=1e-12, atol=1e-12)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    for double in (True, False):
        found = parallel.train_step((x, double), optimizer)
        torch.testing.assert_close(found, net(x, double)["loss"].detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(RunError, match=r"\[4, 6\]"):
        parallel(x[:4], False)
