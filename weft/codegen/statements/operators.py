"""Operators as plain Python.

In: a target and its arguments, already text or literals. Out: an expression with the same meaning, to the bit. A row
is a template over the argument names of the operator's schema:

    F.linear(input, weight, bias?)      `?`: left out where it has its default
    self.mean(dim, keepdim=?)           `=?`: by keyword, left out where it has its default
    self.reshape(*shape)                `*`: spelled out

An argument with a default is marked by `?` or `=?`: calls may leave it out. Arguments that a row does not mention must
have their defaults; otherwise, and for operators without a row, the call is written as
`torch.ops.aten.NAME.OVERLOAD(...)`. Tests run every row against its operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.ops.arguments import overload

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<="}
_BINARY |= {"gt": ">", "ge": ">=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor isfinite isinf isnan log log10 log1p log2 logical_not"
)
_UNARY += " reciprocal round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc relu"

TEMPLATES: Mapping[str, str] = {
    **{f"aten.{name}.Tensor": f"self {sign} other" for name, sign in _BINARY.items()},
    **{f"aten.{name}.Scalar": f"self {sign} other" for name, sign in _BINARY.items()},
    **{f"aten.{name}.default": f"torch.{name}(self)" for name in _UNARY.split()},
    "aten.neg.default": "-self",
    "aten.bitwise_not.default": "~self",
    "aten.pow.Tensor_Scalar": "self**exponent",
    "aten.pow.Tensor_Tensor": "self**exponent",
    "aten.matmul.default": "self @ other",
    "aten.mm.default": "torch.mm(self, mat2)",
    "aten.bmm.default": "torch.bmm(self, mat2)",
    "aten.addmm.default": "torch.addmm(self, mat1, mat2, beta=?, alpha=?)",
    "aten.baddbmm.default": "torch.baddbmm(self, batch1, batch2, beta=?, alpha=?)",
    "aten.einsum.default": "torch.einsum(equation, *tensors)",
    "aten.linear.default": "F.linear(input, weight, bias?)",
    "aten.logical_and.default": "torch.logical_and(self, other)",
    "aten.logical_or.default": "torch.logical_or(self, other)",
    "aten.maximum.default": "torch.maximum(self, other)",
    "aten.minimum.default": "torch.minimum(self, other)",
    # activations
    "aten.gelu.default": "F.gelu(self, approximate=?)",
    "aten.silu.default": "F.silu(self)",
    "aten.mish.default": "F.mish(self)",
    "aten.relu6.default": "F.relu6(self)",
    "aten.hardswish.default": "F.hardswish(self)",
    "aten.hardsigmoid.default": "F.hardsigmoid(self)",
    "aten.leaky_relu.default": "F.leaky_relu(self, negative_slope?)",
    "aten.elu.default": "F.elu(self, alpha?)",
    "aten.softplus.default": "F.softplus(self, beta?, threshold?)",
    "aten.softmax.int": "F.softmax(self, dim, dtype=?)",
    "aten.log_softmax.int": "F.log_softmax(self, dim, dtype=?)",
    "aten.clamp.default": "self.clamp(min=?, max=?)",
    "aten.clamp_min.default": "self.clamp_min(min)",
    "aten.clamp_max.default": "self.clamp_max(max)",
    "aten.dropout.default": "F.dropout(input, p, train)",
    # norms, losses, lookups, attention
    "aten.layer_norm.default": "F.layer_norm(input, normalized_shape, weight?, bias?, eps?)",
    "aten.rms_norm.default": "F.rms_norm(input, normalized_shape, weight?, eps?)",
    "aten.group_norm.default": "F.group_norm(input, num_groups, weight?, bias?, eps?)",
    "aten.embedding.default": "F.embedding(indices, weight, padding_idx=?)",
    "aten.cross_entropy_loss.default": "F.cross_entropy(self, target, weight=?, ignore_index=?, label_smoothing=?)",
    "aten.nll_loss_nd.default": "F.nll_loss(self, target, weight=?, ignore_index=?)",
    "aten.mse_loss.default": "F.mse_loss(self, target)",
    "aten.l1_loss.default": "F.l1_loss(self, target)",
    "aten.binary_cross_entropy_with_logits.default": "F.binary_cross_entropy_with_logits(self, target)",
    "aten.scaled_dot_product_attention.default": "F.scaled_dot_product_attention("
    "query, key, value, attn_mask=?, dropout_p=?, is_causal=?, scale=?, enable_gqa=?)",
    # convolutions and pools
    **{
        f"aten.conv{n}d.default": f"F.conv{n}d(input, weight, bias?, stride=?, padding=?, dilation=?, groups=?)"
        for n in (1, 2, 3)
    },
    **{
        f"aten.conv_transpose{n}d.{overload}": f"F.conv_transpose{n}d(input, weight, bias?, stride=?, padding=?, "
        "output_padding=?, groups=?, dilation=?)"
        for n, overload in ((1, "default"), (2, "input"), (3, "input"))
    },
    "aten.max_pool2d.default": "F.max_pool2d(self, kernel_size, stride=?, padding=?, dilation=?, ceil_mode=?)",
    "aten.avg_pool2d.default": "F.avg_pool2d(self, kernel_size, stride=?, padding=?, ceil_mode=?)",
    "aten.adaptive_avg_pool2d.default": "F.adaptive_avg_pool2d(self, output_size)",
    # shapes
    "aten.reshape.default": "self.reshape(*shape)",
    "aten.view.default": "self.view(*size)",
    "aten.expand.default": "self.expand(*size)",
    "aten.expand_as.default": "self.expand_as(other)",
    "aten.permute.default": "self.permute(*dims)",
    "aten.transpose.int": "self.transpose(dim0, dim1)",
    "aten.t.default": "self.t()",
    "aten.unsqueeze.default": "self.unsqueeze(dim)",
    "aten.squeeze.default": "self.squeeze()",
    "aten.squeeze.dim": "self.squeeze(dim)",
    "aten.flatten.using_ints": "self.flatten(start_dim?, end_dim?)",
    "aten.unflatten.int": "self.unflatten(dim, sizes)",
    "aten.repeat.default": "self.repeat(*repeats)",
    "aten.repeat_interleave.self_int": "self.repeat_interleave(repeats, dim?)",
    "aten.contiguous.default": "self.contiguous(memory_format=?)",
    "aten.clone.default": "self.clone(memory_format=?)",
    "aten.detach.default": "self.detach()",
    "aten.select.int": "self.select(dim, index)",
    "aten.narrow.default": "self.narrow(dim, start, length)",
    "aten.split.Tensor": "self.split(split_size, dim?)",
    "aten.split_with_sizes.default": "self.split(split_sizes, dim?)",
    "aten.chunk.default": "self.chunk(chunks, dim?)",
    "aten.unbind.int": "self.unbind(dim?)",
    "aten.cat.default": "torch.cat(tensors, dim?)",
    "aten.stack.default": "torch.stack(tensors, dim?)",
    "aten.roll.default": "self.roll(shifts, dims?)",
    "aten.flip.default": "self.flip(dims)",
    "aten.tril.default": "self.tril(diagonal?)",
    "aten.triu.default": "self.triu(diagonal?)",
    "aten.pad.default": "F.pad(self, pad, mode=?, value=?)",
    "aten.constant_pad_nd.default": "F.pad(self, pad, value=?)",
    # dtypes
    "aten.to.dtype": "self.to(dtype)",
    "aten.to.device": "self.to(device, dtype)",
    "aten.to.dtype_layout": "self.to(device=?, dtype=?)",
    "aten.type_as.default": "self.type_as(other)",
    # reductions and lookups
    "aten.sum.default": "self.sum(dtype=?)",
    "aten.sum.dim_IntList": "self.sum(dim, keepdim=?, dtype=?)",
    "aten.mean.default": "self.mean(dtype=?)",
    "aten.mean.dim": "self.mean(dim, keepdim=?, dtype=?)",
    "aten.amax.default": "self.amax(dim?, keepdim=?)",
    "aten.amin.default": "self.amin(dim?, keepdim=?)",
    "aten.argmax.default": "self.argmax(dim?, keepdim=?)",
    "aten.cumsum.default": "self.cumsum(dim, dtype=?)",
    "aten.any.default": "self.any()",
    "aten.all.default": "self.all()",
    "aten.gather.default": "self.gather(dim, index)",
    "aten.scatter.src": "self.scatter(dim, index, src)",
    "aten.scatter_add.default": "self.scatter_add(dim, index, src)",
    "aten.scatter.value": "self.scatter(dim, index, value)",
    "aten.index_add.default": "self.index_add(dim, index, source, alpha=?)",
    "aten.histc.default": "torch.histc(self, bins=?, min=?, max=?)",
    "aten.sort.default": "self.sort(dim=?, descending=?)",
    "aten.topk.default": "self.topk(k, dim=?, largest=?, sorted=?)",
    "aten.lerp.Scalar": "torch.lerp(self, end, weight)",
    "aten.index_select.default": "self.index_select(dim, index)",
    "aten.masked_fill.Scalar": "self.masked_fill(mask, value)",
    "aten.masked_fill.Tensor": "self.masked_fill(mask, value)",
    "aten.where.self": "torch.where(condition, self, other)",
    "aten.where.ScalarOther": "torch.where(condition, self, other)",
    # new tensors
    "aten.arange.default": "torch.arange(end, dtype=?, device=?)",
    "aten.arange.start": "torch.arange(start, end, dtype=?, device=?)",
    "aten.arange.start_step": "torch.arange(start, end, step?, dtype=?, device=?)",
    "aten.zeros.default": "torch.zeros(size, dtype=?, device=?)",
    "aten.ones.default": "torch.ones(size, dtype=?, device=?)",
    "aten.full.default": "torch.full(size, fill_value, dtype=?, device=?)",
    "aten.zeros_like.default": "torch.zeros_like(self, dtype=?)",
    "aten.ones_like.default": "torch.ones_like(self, dtype=?)",
    "aten.empty_like.default": "torch.empty_like(self, dtype=?)",
}
"""Templates by target."""

PRODUCTS: Mapping[str, str] = {
    "aten.linear.default": "linear(input, weight, bias?)",
    "aten.addmm.default": "addmm(self, mat1, mat2, beta=?, alpha=?)",
    "aten.matmul.default": "matmul(self, other)",
    "aten.mm.default": "mm(self, mat2)",
    "aten.bmm.default": "bmm(self, mat2)",
    "aten.embedding.default": "embedding(indices, weight, padding_idx=?)",
}
"""Templates of products of trained parameters, which `weft.runtime.weights.products` has."""

WEIGHTS = {
    "aten.linear.default": 1,
    "aten.addmm.default": 2,
    "aten.matmul.default": 1,
    "aten.mm.default": 1,
    "aten.bmm.default": 1,
    "aten.embedding.default": 0,
}
"""By operator, the position of the weight among its arguments."""


@dataclass(frozen=True)
class Written:
    """An argument that is text already: a variable, a lookup."""

    text: str


Show = Callable[[Any], str]


def expression(
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    show: Show,
    templates: Mapping[str, str] = TEMPLATES,
) -> str:
    """The call as Python. Tensors among the arguments are `Written`; `show` writes anything."""
    operator = overload(target)
    assert operator is not None, f"{target} is no operator of torch"
    schema = operator._schema.arguments
    given = {one.name: value for one, value in zip(schema, args, strict=False)} | dict(kwargs)
    defaults = {one.name: one.default_value for one in schema}
    plain = {name for name in defaults if name not in given or _is_default(name, given[name], defaults[name])}
    if target == "aten.slice.Tensor":
        return _slice(given, show)
    if target == "aten.index.Tensor":
        return _index(given, show)
    template = templates.get(target)
    found = None if template is None else _filled(template, given, defaults, plain, show)
    if found is not None:
        return found
    words = [*(show(value) for value in args), *(f"{name}={show(value)}" for name, value in kwargs.items())]
    return f"torch.ops.{target}({', '.join(words)})"


def _is_default(name: str, value: Any, default: Any) -> bool:
    # those of the backend change no number on devices that lack it
    if name in ("pin_memory", "layout", "implicit", "cudnn_enable", "cudnn_enabled") and value in (
        None,
        False,
        torch.strided,
    ):
        return True
    return type(value) is type(default) and bool(value == default)


def _filled(
    template: str, given: Mapping[str, Any], defaults: Mapping[str, Any], plain: set[str], show: Show
) -> str | None:
    """The template with arguments put in; None if it does not cover the call."""
    mentioned = {name for name in re.findall(r"[A-Za-z_]\w*", template) if name in defaults}
    if any(name not in mentioned and name not in plain for name in given):
        return None
    match = re.fullmatch(r"(?:(?P<self>self)\.)?(?P<head>[\w.]+)\((?P<inside>.*)\)", template)
    if match is None:
        return _operator(template, given, show)
    receiver = ""
    if match["self"]:
        if not isinstance(given.get("self"), Written):
            return None
        receiver = given["self"].text + "."
    words = _arguments(match["inside"], given, plain, show)
    return f"{receiver}{match['head']}({', '.join(words)})"


def _arguments(inside: str, given: Mapping[str, Any], plain: set[str], show: Show) -> list[str]:
    words: list[str] = []
    skipped = False
    for word in filter(None, inside.split(", ")):
        name = word.strip("*?=")
        keyword = word.endswith("=?")
        if word.endswith("?") and name in plain:
            skipped = True
        elif word.startswith("*"):
            items = given[name]
            words += map(show, items) if items else [show(items)]
        else:
            shown = show(given[name])
            words.append(f"{name}={shown}" if keyword or skipped else shown)
    return words


def _operator(template: str, given: Mapping[str, Any], show: Show) -> str | None:
    """`self + other`: only between a tensor and something, lest Python does it by itself."""
    if not isinstance(given["self"], Written):
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda found: show(given[found[0]]), template)


def _index(given: Mapping[str, Any], show: Show) -> str:
    """`x[:, rows]`"""
    words = [":" if one is None else show(one) for one in given["indices"]]
    return f"{show(given['self'])}[{', '.join(words)}]"


def _slice(given: Mapping[str, Any], show: Show) -> str:
    dim, step = int(given.get("dim", 0)), int(given.get("step", 1))
    start, end = given.get("start"), given.get("end")
    first = "" if start is None or _number(start) == 0 else show(start)
    last = "" if end is None or (_number(end) or 0) >= 2**62 else show(end)
    colon = " : " if not _simple(first) or not _simple(last) else ":"
    inner = (first + colon + last).strip() + (f"{colon.strip()}{step}" if step != 1 else "")
    if dim < 0:
        tail = ", :" * (-dim - 1)
        return f"{given['self'].text}[..., {inner}{tail}]"
    return f"{given['self'].text}[{':, ' * dim}{inner}]"


def _simple(word: str) -> bool:
    return not word or word.replace("-", "").isalnum()


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
