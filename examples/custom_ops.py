"""A model file with operators of its own: stated, discovered, of a torch library, and one whose parts talk."""

import math

import torch
from torch import Tensor, nn

import weft
from weft.runtime.comm import Comms, reduce, sum_over


@weft.register_op("b s h+, f h+ -> b s f")
def project(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer, its rule stated: h is summed away, so cutting it leaves addends."""
    return x @ weight.t()


@weft.register_op
def gated(x: Tensor, bias: Tensor | None = None, *, power: int = 2) -> dict[str, Tensor | int]:
    """No rule: it is run on small inputs, and what may be cut is found."""
    value, gate = (x if bias is None else x + bias).chunk(2, dim=-1)
    return {"y": value * gate.sigmoid().pow(power), "power": power}


@weft.register_op("b s h! -> b s h", comm="h")
def spread(x: Tensor, comm: Comms = ()) -> Tensor:
    """A softmax over h: where h is cut the parts agree on the largest value and on the sum."""
    exponent = (x - reduce(x.amax(-1, keepdim=True), comm, "max")).exp()
    return exponent / sum_over(exponent.sum(-1, keepdim=True), comm)


@weft.register_op("b s h, h -> b s h", indices="h")
def turned(x: Tensor, scale: Tensor, indices: tuple[tuple[int, int], ...] | None = None) -> Tensor:
    """Depends on where in h a number stands, so a part must know which ones it holds."""
    held = ((0, x.shape[-1]),) if indices is None else indices
    at = torch.cat([torch.arange(start, stop, device=x.device) for start, stop in held])
    return x * scale * torch.cos(at.to(x.dtype) / math.pi)


@torch.library.custom_op("custom_ops::swish", mutates_args=())
def swish(x: Tensor, beta: float) -> Tensor:
    """An operator of a torch library: found by running it, too."""
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _shape(x: Tensor, beta: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
    (x,), beta = ctx.saved_tensors, ctx.beta  # type: ignore[attr-defined]
    sigmoid = torch.sigmoid(beta * x)
    return grad * (sigmoid + beta * x * sigmoid * (1 - sigmoid)), None


swish.register_autograd(_backward, setup_context=_keep)


class Net(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * hidden, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(width, hidden) / math.sqrt(hidden))
        self.scale = nn.Parameter(torch.ones(hidden))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = gated(project(x, self.up), power=3)["y"]
        assert isinstance(y, Tensor)
        y = turned(spread(self.dropout(swish(y, 1.5))), self.scale)
        loss: Tensor = (project(y, self.down) - target).square().mean()
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net(width=12, hidden=24)


def example() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 6, 12), "target": torch.randn(4, 6, 12)}
