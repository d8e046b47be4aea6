"""What cannot be captured faithfully is refused, with the user's line and what to do."""

from __future__ import annotations

import logging
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

import weft
from tests.capture.compare import assert_untouched, state_of
from weft.capture import capture
from weft.errors import CaptureError

X = torch.randn(4, 6)


class Does(nn.Module):
    """One forward for each thing that cannot be captured."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.what, self.calls, self.seen, self.table = what, 0, deque(), {}
        self.state = SimpleNamespace(steps=0)
        self.last: Tensor | None = None
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return getattr(self, self.what)(y).sum()

    def branch(self, y: Tensor) -> Tensor:
        if y.sum() > 0:
            y = y * 2
        return y

    def item(self, y: Tensor) -> Tensor:
        return y * y.max().item()

    def to_list(self, y: Tensor) -> Tensor:
        return y * y[0].tolist()[0]

    def nonzero(self, y: Tensor) -> Tensor:
        return y[y > 0]

    def loop(self, y: Tensor) -> Tensor:
        return y[: int(y.argmax())]

    def layer_drop(self, y: Tensor) -> Tensor:
        return y if torch.rand([]) < 0.1 else y * 2

    def python_random(self, y: Tensor) -> Tensor:
        return y * random.random()

    def numpy_random(self, y: Tensor) -> Tensor:
        return y * float(np.random.rand())

    def numpy_generator(self, y: Tensor) -> Tensor:
        return y * float(self.generator.random())

    def counts(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y

    def grows(self, y: Tensor) -> Tensor:
        self.seen.append(y.shape)
        return y

    def fills(self, y: Tensor) -> Tensor:
        self.table["shape"] = tuple(y.shape)
        return y

    def steps(self, y: Tensor) -> Tensor:
        self.state.steps += 1
        return y

    def keeps(self, y: Tensor) -> Tensor:
        self.last = y
        return y

    def logs(self, y: Tensor) -> Tensor:
        self.last = y.mean().item()
        return y

    def collects(self, y: Tensor) -> Tensor:
        self.seen.append(y.mean().item())
        return y

    def prints(self, y: Tensor) -> Tensor:
        print(f"{y.mean().item():.3f}")
        return y

    def floats(self, y: Tensor) -> Tensor:
        return y * float(y.max())

    def to_numpy(self, y: Tensor) -> Tensor:
        return y * float(y.detach().numpy().max())

    def compares(self, y: Tensor) -> Tensor:
        return y if torch.allclose(y, y * 2) else y * 2

    def vectorises(self, y: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.linear(row).square())(y)

    def names_a_device(self, y: Tensor) -> Tensor:
        return y + torch.ones(6, device="cuda")

    def moves(self, y: Tensor) -> Tensor:
        return y.cuda()

    def averages(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9).add_(1.0, alpha=0.1)
        return y

    def clips(self, y: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-1, 1)
        return y

    def casts(self, y: Tensor) -> Tensor:
        return self.linear.to(torch.float32).to(torch.float64)(y.double())

    def sets_data(self, y: Tensor) -> Tensor:
        y.data = y.data * 2
        return y

    def fails(self, y: Tensor) -> Tensor:
        raise KeyError("no such thing")


CASES = [
    ("branch", "depends on the values", "if y.sum() > 0:"),
    ("item", "taken from the values", "y.max().item()"),
    ("to_list", "values", "y[0].tolist()[0]"),
    ("nonzero", "depends on the values", "return y[y > 0]"),
    ("loop", "values", "y[: int(y.argmax())]"),
    ("layer_drop", "depends on the values", "torch.rand([]) < 0.1"),
    ("python_random", "random generator", "y * random.random()"),
    ("numpy_random", "random generator", "float(np.random.rand())"),
    ("numpy_generator", "attribute generator", "float(self.generator.random())"),
    ("counts", "attribute calls", "self.calls += 1"),
    ("grows", "attribute seen", "self.seen.append(y.shape)"),
    ("fills", "attribute table", 'self.table["shape"]'),
    ("steps", "attribute state", "self.state.steps += 1"),
    ("keeps", "attribute last", "self.last = y"),
    ("logs", "number from the values .* attribute last", "self.last = y.mean().item()"),
    ("collects", "number from the values .* attribute seen", "self.seen.append(y.mean().item())"),
    ("prints", "taken from the values", 'print(f"{y.mean().item():.3f}")'),
    ("floats", "taken from the values", "float(y.max())"),
    ("to_numpy", "taken from the values", ".numpy()"),
    ("compares", "depends on the values .*aten.allclose", "torch.allclose"),
    ("vectorises", "torch.vmap", "torch.vmap(lambda row"),
    ("names_a_device", "device of its own choice", 'device="cuda"'),
    ("moves", "device of its own choice", "y.cuda()"),
    ("averages", "parameter linear.weight is changed", "self.linear.weight.mul_(0.9)"),
    ("clips", "parameter linear.weight is changed", "self.linear.weight.data.clamp_"),
    ("casts", "moves or casts the parameters of Linear", ".to(torch.float64)"),
    ("sets_data", "sets the .data of a tensor", "y.data = y.data * 2"),
    ("fails", "KeyError", "raise KeyError"),
]


@pytest.mark.parametrize(("what", "words", "line"), CASES, ids=[case[0] for case in CASES])
def test_refused(what: str, words: str, line: str) -> None:
    module = Does(what)
    before = state_of(module)
    with pytest.raises(CaptureError, match=words) as caught:
        capture(module, X)
    error = caught.value
    assert error.place.startswith("tests/capture/test_refusals.py:") and line in error.place
    assert error.remedy
    assert_untouched(module, before)
    assert module.calls == 0 and not module.seen and module.table == {}


def test_remedies_fit() -> None:
    for what, words in [
        *((what, "return it as an output") for what in ("logs", "collects", "prints", "floats", "item")),
        ("names_a_device", "x.device"),
        ("moves", "x.device"),
        ("averages", "make it a buffer"),
    ]:
        with pytest.raises(CaptureError) as caught:
            capture(Does(what), X)
        assert words in caught.value.remedy


def test_torch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    for what in ("branch", "loop", "floats"):
        with pytest.raises(CaptureError) as caught:
            capture(Does(what), X)
        assert len(str(caught.value).split("\n")) == 3
        assert not any(word in str(caught.value) for word in ("u0", "Eq(", "unhinted", "data-dependent"))
    assert capfd.readouterr() == ("", "")
    assert not logger.disabled


@pytest.mark.parametrize(
    ("spoil", "words", "remedy"),
    [
        (torch.jit.script, "torch.jit", "the plain module"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refuses_modules(spoil: Any, words: str, remedy: str) -> None:
    module = Does("branch")
    module.linear = spoil(module.linear)
    for run in (lambda: capture(module, X), lambda: weft.parallelize(module, X, "dp=2", emulate=True)):
        with pytest.raises(CaptureError, match=words) as caught:
            run()
        assert remedy in caught.value.remedy and caught.value.place == "module linear"


class Ragged(nn.Module):
    """Shapes and branches that only values tell."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.lstm, self.linear = what, nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.what)(x)

    def packs(self, x: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, torch.tensor([5, 2]), batch_first=True)
        return rnn.pad_packed_sequence(self.lstm(packed)[0])[0].sum()

    def nests(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[0], x[1, :3]])
        return self.linear(rows).to_padded_tensor(0.0).sum()

    def jags(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        return self.linear(rows).values().sum()

    def chooses(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).sum()

    def closes_over(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.linear(row).sum())(x).sum()

    def derives(self, x: Tensor) -> Tensor:
        return torch.func.jvp(self.linear, (x,), (x,))[1].sum()

    def solves(self, x: Tensor) -> Tensor:
        return torch.linalg.lstsq(self.linear(x), x).solution.sum()


RAGGED = [
    ("packs", "packs a sequence", "rnn.pack_padded_sequence(", "padded batch"),
    ("nests", "nested tensor", "nested.nested_tensor(", "padded batch"),
    ("jags", "nested tensor", "as_nested_tensor(", "padded batch"),
    ("chooses", r"torch\.cond", "torch.cond(", "torch.where"),
    ("closes_over", r"torch\.vmap", "torch.vmap(", "whole batch"),
    ("derives", "derivative", "torch.func.jvp(", "outside forward"),
    ("solves", "residuals", "torch.linalg.lstsq(", "pinv"),
]


@pytest.mark.parametrize(("what", "words", "line", "remedy"), RAGGED)
@pytest.mark.filterwarnings("ignore")
def test_shapes_and_branches_of_values(what: str, words: str, line: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Ragged(what), torch.randn(2, 5, 6))
    assert line in caught.value.place and remedy in caught.value.remedy


def test_refuses_ragged_examples() -> None:
    rows = [torch.randn(5, 6), torch.randn(3, 6)]
    for example in (rnn.pack_sequence(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)):
        with pytest.raises(CaptureError, match="depends on values") as caught:
            capture(nn.LSTM(6, 6), (example,))
        assert "padded batch" in caught.value.remedy


def test_refuses_parameters_without_a_shape() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    for run in (lambda: capture(module, X), lambda: weft.parallelize(module, X, "dp=2", emulate=True)):
        with pytest.raises(CaptureError, match="without a shape") as caught:
            run()
        assert caught.value.place == "module 0" and "run forward once" in caught.value.remedy
    module(X)
    capture(module, X)


def test_refuses_embedding_that_shrinks_its_rows() -> None:
    with pytest.raises(CaptureError, match=r"max_norm changes its weight 0\.weight"):
        capture(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), torch.tensor([1, 2]))


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum()


def test_buffer_that_grows() -> None:
    with pytest.raises(CaptureError, match="buffer seen") as caught:
        capture(Grows(), X)
    assert "test_refusals.py" in caught.value.place


def test_reads_of_attributes_are_no_changes() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.table = [1, 2], {"a": 3.0}

        def forward(self, x: Tensor) -> Tensor:
            self.steps = [1, 2]
            return x.sum() * self.steps[1] * self.table["a"]

    assert capture(Reads(), X).loss is not None


def test_interrupt_is_not_swallowed() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(Interrupted(), X)


class Meddles(nn.Module):
    """Acts on autograd from inside forward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.what == "hook":
            y.register_hook(lambda grad: grad * 2)
        if self.what == "grad":
            (y,) = torch.autograd.grad(y.pow(2).sum(), self.linear.weight, create_graph=True)
        if self.what == "freeze":
            self.linear.weight.requires_grad_(False)
        if self.what == "function":
            y = Noisy.apply(y)
        return y.sum()


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize(
    ("what", "words", "line"),
    [
        ("hook", "gradient hook", "y.register_hook("),
        ("grad", "autograd.grad", "torch.autograd.grad("),
        ("freeze", "freezes", "test_refusals.py"),
        ("function", "Noisy draws random numbers", "torch.rand_like(x)"),
    ],
)
def test_refuses_meddling(what: str, words: str, line: str) -> None:
    module = Meddles(what)
    with pytest.raises(CaptureError, match=words) as caught:
        capture(module, X)
    assert line in caught.value.place and caught.value.remedy
    assert module.linear.weight.requires_grad


def test_refuses_hooks() -> None:
    module = nn.Sequential(nn.Linear(6, 6))
    handle = module[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"the module 0 \(Linear\) has backward hooks") as caught:
        capture(module, X)
    assert caught.value.place == "module 0" and "handle.remove()" in caught.value.remedy
    handle.remove()
    module[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(CaptureError, match=r"the parameter 0\.weight has gradient hooks"):
        capture(module, X)


def test_refuses_unseen_gradient_in_reentrant_checkpoint() -> None:
    class Adapts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = (x * 2).requires_grad_(True)
            return checkpoint(self.linear, y, use_reentrant=True).sum()

    with pytest.raises(CaptureError, match="reentrant") as caught:
        capture(Adapts(), X)
    assert "requires_grad_(True)" in caught.value.place


def test_refuses_inputs_that_forward_lets_require_a_gradient() -> None:
    class Adapts(nn.Module):
        def __init__(self, adapt: Any) -> None:
            super().__init__()
            self.linear, self.adapt = nn.Linear(6, 6), adapt

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.adapt(x)).sum()

    def sets(x: Tensor) -> Tensor:
        x.requires_grad = True
        return x

    for adapt in (lambda x: x.requires_grad_(), sets):
        with pytest.raises(CaptureError, match=r"input x require a gradient") as caught:
            capture(Adapts(adapt), X.float())
        assert "requires_grad" in caught.value.place and "x.requires_grad_() before" in caught.value.remedy
    capture(Adapts(lambda x: x.requires_grad_()), X.float().requires_grad_())
    capture(Adapts(lambda x: x.requires_grad_(False)), X.float())
    capture(Adapts(lambda x: x.detach().requires_grad_()), X.float())


class Notes(nn.Module):
    """Writes into an object of its own, as classifiers of transformers do into their configuration."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.config = SimpleNamespace(problem=None, matters=matters)

    def forward(self, x: Tensor) -> Tensor:
        known = self.config.problem is not None
        self.config.problem = "regression"
        return self.linear(x).sum() * (2 if known and self.config.matters else 1)


def test_object_that_settles_is_accepted() -> None:
    module = Notes(matters=False)
    assert capture(module, X).loss is not None
    assert module.config.problem is None
    with pytest.raises(CaptureError, match="second forward of Notes differs from its first"):
        capture(Notes(matters=True), X)


class Measures(nn.Module):
    """Sets numbers of its own that later lines read, as Funnel does; `matters` if the next forward reads them first."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.length: int | None = None
        self.scale, self.matters = 1.0, matters

    def forward(self, x: Tensor) -> Tensor:
        known = self.length is not None
        self.length, self.scale, self.width = x.shape[0], 0.5, x.shape[1]
        return self.linear(x).sum() * self.scale / self.length * (2 if known and self.matters else 1)


def test_numbers_that_settle_are_accepted() -> None:
    module = Measures(matters=False)
    assert capture(module, X).loss is not None
    assert module.length is None and module.scale == 1.0 and "width" not in vars(module)
    with pytest.raises(CaptureError, match="second forward of Measures differs from its first"):
        capture(Measures(matters=True), X)


class Stays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(torch.float32)
        return self.linear(x).sum()


def test_a_cast_that_changes_nothing_is_accepted() -> None:
    assert [op.kind for op in capture(Stays(), X).ops] == ["linear", "sum"]
