"""How an op ran: grad mode, autocast, checkpoint regions, opaque functions, module calls, source lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.capture.compare import assert_same
from weft import verify
from weft.capture import capture
from weft.errors import CaptureError

X = torch.randn(4, 6, dtype=torch.float64)


class Recycles(nn.Module):
    """Gradients flow through the last pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(2):
                x = self.step(x).tanh()
                with torch.enable_grad():
                    kept = self.step(x)
        return self.step(x).sum() + kept.mean()


def test_no_grad_region() -> None:
    graph = assert_same(Recycles(), X)
    assert [op.grad for op in graph.ops if op.kind == "tanh"] == [False, False]
    calls = [(op.name, op.grad) for op in graph.ops if op.kind == "linear"]
    assert calls == [("step/linear", False), ("step@2/linear", False), ("step@3/linear", True), ("step@4/linear", True)]
    assert all(op.path == "step" and op.call == int(op.name[5] if "@" in op.name else 0) for op in graph.ops if op.path)


class Looks(nn.Module):
    """Looks at tensors without grad mode and goes on with what it saw."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.a, self.b, self.look = nn.Linear(6, 8), nn.Linear(8, 6), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            seen = self.look(y, self.a.weight)
        return (self.b(F.gelu(y)) * seen.mean()).square().mean() + (seen * 2).sum()


class Shows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("no gradient is asked for")


@pytest.mark.parametrize(
    "look",
    [
        lambda y, w: w.T,
        lambda y, w: w.view(-1),
        lambda y, w: w.mH,
        lambda y, w: y.flatten(0, 1),
        lambda y, w: w.view(-1).view(2, -1)[0],
        lambda y, w: y.split(2)[1],
        lambda y, w: y.detach(),
        lambda y, w: y.T.contiguous(),
        lambda y, w: Shows.apply(y),
        lambda y, w: w.T.chunk(2, 1)[1].exp(),
    ],
)
def test_view_without_grad_mode(look: Any) -> None:
    graph = assert_same(Looks(look).double(), X)
    assert not any(graph.tensors[name].needs_grad for op in graph.ops if not op.grad for name in op.outputs)


@pytest.mark.parametrize("look", [lambda y, w: w.contiguous(), lambda y, w: y.to(y.dtype), lambda y, w: w.flatten(1)])
def test_the_same_tensor_without_grad_mode_keeps_its_gradient(look: Any) -> None:
    graph = assert_same(Looks(look).double(), X)
    assert all(op.grad for op in graph.ops)


def test_spectral_norm() -> None:
    module = Looks(lambda y, w: w.T)
    module.a = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    assert_same(module.double(), X)


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.second(y)
            with torch.autocast("cpu", enabled=False):
                y = self.first(y)
        return z.float().sum() + y.sum()


def test_autocast_region() -> None:
    graph = assert_same(Casts(), X.float(), tolerance=1e-6)
    casts = {op.name: op.autocast for op in graph.ops if op.kind == "linear"}
    assert casts["first/linear"] is None
    assert casts["second/linear"] is not None and casts["second/linear"].dtype is torch.bfloat16
    assert casts["first@1/linear"] is not None and not casts["first@1/linear"].enabled
    assert graph.tensors["second/linear"].dtype is torch.bfloat16
    assert graph.tensors["first@1/linear"].dtype is torch.float32


def test_autocast_around_capture() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(nn.Linear(6, 2), X.float())
    assert graph.tensors["linear"].dtype is torch.bfloat16
    assert graph.ops[0].autocast is not None


class Odd(torch.autograd.Function):
    """Backward is wrong on purpose: only the user's own could give it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: list[Tensor], factor: float) -> tuple[Tensor, int, Tensor]:
        with torch.no_grad():
            y = x * factor + weights[0]
        ctx.mark_non_differentiable(mask := x > 0)
        return y, 3, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        return grad * 100, None, None


odd = Odd.apply


class SetsUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].sign(), None


class UsesFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.shift = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y, number, mask = odd(self.linear(x), [self.shift], 3.0)
        z = SetsUp.apply(y * number)
        return (z * mask).sum() + self.linear(y).sum()


def test_autograd_function_is_kept_whole() -> None:
    graph = assert_same(UsesFunctions(), X)
    opaque = [op for op in graph.ops if op.function is not None]
    assert [op.target for op in opaque] == ["function:Odd", "function:SetsUp"]
    assert opaque[0].args[-1] == 3.0 and len(opaque[0].outputs) == 2
    assert [graph.tensors[name].needs_grad for name in opaque[0].outputs] == [True, False]
    assert opaque[0].source.text.startswith("y, number, mask = odd(")
    assert not any(op.kind == "pow" for op in graph.ops)


class Scaled(torch.autograd.Function):
    """Backward gives the scale no gradient: none, not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class UsesScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.linear(x), self.scale).sum()


def test_argument_without_gradient_is_detached() -> None:
    graph = assert_same(UsesScaled(), X)
    assert [(op.kind, op.inputs) for op in graph.ops if op.kind == "detach"] == [("detach", ("scale",))]
    assert verify(UsesScaled(), (X,), plan="dp=2").equal, "weight decay must not touch what has no gradient"


class WritesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_refuses_function_that_writes_its_input() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return WritesInput.apply(x + 1).sum()

    with pytest.raises(CaptureError, match="WritesInput changes its input in place"):
        capture(Module(), X)


class Checkpoints(nn.Module):
    def __init__(self, reentrant: bool, detached: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(3)]).double()
        self.reentrant, self.detached = reentrant, detached

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x.detach() if self.detached else x
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.sum() + sum(p.sum() for p in self.layers[0].parameters())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_checkpoint(reentrant: bool) -> None:
    graph = assert_same(Checkpoints(reentrant), X)
    for path, region in (("layers.0.", None), ("layers.1.", 1), ("layers.2.", 2)):
        assert {op.recompute for op in graph.ops if op.path.startswith(path)} == {region}


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoint_without_gradient_gives_none() -> None:
    graph = assert_same(Checkpoints(reentrant=True, detached=True), X)
    assert not any(graph.tensors[name].needs_grad for op in graph.ops if op.recompute for name in op.outputs)
    graph = assert_same(Checkpoints(reentrant=False, detached=True), X)
    assert any(graph.tensors[name].needs_grad for op in graph.ops if op.recompute for name in op.outputs)


def helper(x: Tensor) -> Tensor:
    return x.sin() * 2


class Sourced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = helper(x)
        return nn.functional.gelu(y).sum()


def test_source_lines_are_the_users() -> None:
    graph = capture(Sourced(), X)
    texts = {op.kind: op.source.text for op in graph.ops}
    assert texts == {
        "sin": "return x.sin() * 2",
        "mul": "return x.sin() * 2",
        "gelu": "return nn.functional.gelu(y).sum()",
        "sum": "return nn.functional.gelu(y).sum()",
    }
    assert {op.source.file for op in graph.ops} == {"tests/capture/test_context.py"}
    assert "return x.sin() * 2  (sin)" in graph.by_name["sin"].place


def test_patches_are_taken_back() -> None:
    names = (torch.utils.checkpoint._checkpoint_without_reentrant_generator, torch.autograd.Function.apply.__func__)
    capture(UsesFunctions(), X)
    with pytest.raises(CaptureError):
        capture(Checkpoints(True), "no example")
    after = (torch.utils.checkpoint._checkpoint_without_reentrant_generator, torch.autograd.Function.apply.__func__)
    assert names == after
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__
    assert not any("weft" in str(target) for target in torch.fx.node._side_effectful_functions)


class Asks(nn.Module):
    """Goes another way when it is compiled; `reads` if the eager way takes a number from a tensor."""

    def __init__(self, reads: bool, owner: Any = torch.compiler) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.reads, self.owner = reads, owner

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.owner.is_compiling() and not torch.compiler.is_exporting():
            return y.sum() * (y.max().item() if self.reads else 2.0)
        return y.exp().sum()


@pytest.mark.parametrize("owner", [torch.compiler, torch._dynamo, torch._utils])
def test_eager_way_is_captured(owner: Any) -> None:
    kinds = [op.kind for op in capture(Asks(False, owner), torch.randn(4, 6)).ops]
    assert "mul" in kinds and "exp" not in kinds


def test_compiled_way_is_captured_if_the_eager_one_cannot_be() -> None:
    assert "exp" in [op.kind for op in capture(Asks(reads=True), torch.randn(4, 6)).ops]
    assert not torch.compiler.is_compiling()
