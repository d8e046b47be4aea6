"""Functions that a trace cannot hold, in a form that it can.

Enters: a call that forward makes. Leaves: None where it may run as it stands, else the call that takes its place.
Promised: where the two would differ, the new one raises, here or in the run.

`x.data` is a tensor that export knows nothing of, and so a constant: `x.detach()` has the same values and memory. To
set it is to change x unseen, which is refused.

`torch.bincount(x, minlength=n)` is longer than n only if some value is n or more. Whoever gives a length wants that
length: counts are added into n places, and a value beyond them raises. Without a length the call is refused.

Recurrent layers with dropout between them are called one by one, with a dropout between two of them, so that each draw
of random numbers is an op of its own. Torch runs the steps of a sequence in its first dim, whatever `batch_first` says,
and drops there: so do the calls made here, or other numbers would be drawn.

Covariances and `gaussian_nll_loss` look at their weights and variances to refuse bad ones: the same is expected of
them in every step (`expect.py`).

A batch norm without momentum averages over all batches so far. torch reads their number out of its buffer, which a
trace cannot; `forward_of_batch_norm` stands in for it with the same arithmetic on tensors. A transformer looks whether
its mask is the causal one, to leave it out; `not_causal` says that it is not, and the mask is used. Without gradients
an encoder packs sequences that are padded at their ends, and gives zeros there: `padded_with_zeros` gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions.gamma import Gamma
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from weft.capture.source import place_here
from weft.errors import CaptureError

GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
LAYERS: Mapping[Any, bool] = {getattr(torch, name): name == "lstm" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
"""Functions of whole stacks of layers, and whether their state is a pair."""
NUM_ARGUMENTS = 9
torchs_forward = _BatchNorm.forward


def stable_form(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What to call instead of `func(*args, **kwargs)`; None for itself."""
    if func in (torch.bincount, torch.Tensor.bincount):
        return lambda: _bincount(*args, **kwargs)
    if func in CHECKED:
        return lambda: CHECKED[func](*args, **kwargs)
    if _drops_between(func, args, kwargs):
        return lambda: _by_layers(func, args)
    if func == GET_DATA:
        return args[0].detach  # type: ignore[no-any-return]
    if func == SET_DATA:
        raise CaptureError(
            "forward sets the .data of a tensor, which a graph does not see",
            place=place_here(),
            remedy="compute a new tensor, or copy_() into a buffer",
        )
    if func is nn.functional.one_hot and _classes(*args, **kwargs) < 0:
        raise _unknown("one_hot", "the number of classes", "give num_classes=...")
    return None


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength <= 0:
        raise _unknown("bincount", "how many counts there are", "give minlength=..., one more than the largest value")
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    places = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    # counts have no gradient
    return places.scatter_add(0, input.long(), weights.detach())


def _expect(predicate: Tensor) -> None:
    torch.ops.weft.expect(predicate, True)


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [one for one in (fweights, aweights) if one is not None]
    for one in given:
        _expect((one >= 0).all())
    if not given:
        x = x - (x.sum(1) / x.shape[1]).unsqueeze(1)
        return torch.true_divide(torch.mm(x, x.t().conj()), max(x.shape[1] - correction, 0)).squeeze()
    weights = math.prod(given[1:], start=given[0])
    total = weights.sum()
    _expect(total != 0)
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    x = x - ((x * weights).sum(1) / total).unsqueeze(1)
    return torch.true_divide(torch.mm(x, (x * weights).t().conj()), (total - lost).clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    found = _cov(input)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    if isinstance(var, float):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    _expect((var >= 0).all())
    var = var.unsqueeze(-1) if input.shape[:-1] == var.shape else var
    other = [size for size, wanted in zip(var.shape, input.shape, strict=False) if size != wanted]
    if var.dim() != input.dim() or sum(other) > 1 or reduction not in ("none", "mean", "sum"):
        raise ValueError(f"gaussian_nll_loss: var of shape {tuple(var.shape)}, reduction {reduction}")
    # a variance below eps is raised to it, and its gradient passes
    var = torch.where(var < eps, var - var.detach() + eps, var)
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


CHECKED: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.cov, torch.Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, torch.Tensor.corrcoef), _corrcoef),
    functional.gaussian_nll_loss: _gaussian_nll_loss,
}
"""Functions that check values."""


def not_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Stands in for what torch's transformers ask of a mask while tracing."""
    return is_causal is True


def packs(self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    """Whether torch packs what is padded at its end, where no gradients are recorded."""
    may = getattr(self, "use_nested_tensor", False) and getattr(self, "mask_check", True)
    given = src.dim() == 3 and padding is not None and mask is None
    ways = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return bool(may and ways and given and not self.layers[0].training)


def needs_grad(self: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether what torch looks at to record gradients requires one."""
    layer = self.layers[0]
    held = (*layer.self_attn.parameters(), *layer.norm1.parameters(), *layer.norm2.parameters())
    more = (*layer.linear1.parameters(), *layer.linear2.parameters())
    return any(one.requires_grad for one in (src, *held, *more))


def padded_with_zeros(self: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> Tensor:
    """What torch's encoder gives of sequences that it packs, and of others."""
    padded = padding if padding.dtype == torch.bool else padding != 0
    output = src
    for layer in self.layers:
        output = layer(output, src_key_padding_mask=padding)
    at_end = (padded[:, 1:] >= padded[:, :-1]).all()
    output = torch.where((padded & at_end).unsqueeze(-1), 0.0, output)
    return output if self.norm is None else self.norm(output)


def rsample_of_gamma(self: Gamma, sample_shape: Sequence[int] = ()) -> Tensor:
    """Stands in for that of torch while tracing, which raises the smallest numbers unseen by autograd."""
    shape = self._extended_shape(torch.Size(sample_shape))
    value = torch._standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    tiny = torch.finfo(value.dtype).tiny
    return torch.where(value < tiny, value - value.detach() + tiny, value)


def _classes(tensor: Tensor, num_classes: int = -1) -> int:
    return num_classes


def _unknown(name: str, what: str, remedy: str) -> CaptureError:
    return CaptureError(
        f"{name} takes {what} from the values in a tensor, and shapes must be known before the run",
        place=place_here(),
        remedy=remedy,
    )


def _drops_between(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws between its layers. Packed sequences are not meant: what they hold is not known."""
    if func not in LAYERS or kwargs or len(args) != NUM_ARGUMENTS or isinstance(args[1], Tensor) != (not LAYERS[func]):
        return False
    _, _, weights, _, num_layers, dropout, train, _, _ = args
    return bool(not isinstance(weights, Tensor) and train and dropout > 0 and num_layers > 1)


def _by_layers(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """What the call gives."""
    x, state, weights, biases, num_layers, dropout, train, both, batch_first = args
    states = tuple(state) if LAYERS[func] else (state,)
    ways = 2 if both else 1
    each = len(weights) // num_layers
    batched = x.dim() == 3
    x = x.transpose(0, 1) if batch_first and batched else x
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        own = tuple(one[layer * ways : (layer + 1) * ways] for one in states)
        part = weights[layer * each : (layer + 1) * each]
        start = own if LAYERS[func] else own[0]
        x, *end = func(x, start, part, biases, 1, 0.0, train, both, False)
        ends.append(tuple(end))
        if layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first and batched else x
    return x, *(torch.cat(one) for one in zip(*ends, strict=True))


def forward_of_batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Stands in for the forward of torch's batch norm while tracing."""
    count = self.num_batches_tracked
    averages = self.momentum is None and self.training and self.track_running_stats
    if not averages or count is None or self.running_mean is None or self.running_var is None:
        return torchs_forward(self, input)
    self._check_input_dim(input)
    count.add_(1)
    with torch.no_grad():
        x = input.to(self.running_mean.dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        share = 1.0 / count.to(self.running_mean.dtype)
        self.running_mean.lerp_(x.mean(dims), share)
        self.running_var.lerp_(x.var(dims), share)
    return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
