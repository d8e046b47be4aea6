"""Operators of the table, some of each family, whose rules discovery has to find: target -> (args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def r(*sizes: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(sizes, dtype=torch.float64)


def i(high: int, *sizes: int) -> torch.Tensor:
    """Random indices below `high`."""
    return torch.randint(high, sizes)


def _(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def moving() -> dict[str, Arguments]:
    """Views, pieces, indexing."""
    return {
        "aten.view.default": _(r(4, 6, 8), [4, 6, 2, 4]),
        "aten.reshape.default": _(r(4, 6, 2, 4), [4, 6, 8]),
        "aten.flatten.using_ints": _(r(4, 3, 4), 1),
        "aten.unflatten.int": _(r(4, 12), 1, [3, 4]),
        "aten.permute.default": _(r(4, 6, 5), [2, 0, 1]),
        "aten.transpose.int": _(r(4, 6, 5), 1, -1),
        "aten.expand.default": _(r(4, 1, 6), [5, 4, 8, -1]),
        "aten.unsqueeze.default": _(r(4, 6), 1),
        "aten.squeeze.dim": _(r(4, 1, 6), 1),
        "aten.cat.default": _([r(4, 6, 5), r(4, 3, 5)], 1),
        "aten.stack.default": _([r(4, 6), r(4, 6)], 1),
        "aten.unbind.int": _(r(4, 3, 6), 1),
        "aten.select.int": _(r(4, 6, 5), 1, 2),
        "aten.flip.default": _(r(4, 6, 5), [1]),
        "aten.roll.default": _(r(4, 6, 5), [2], [1]),
        "aten.constant_pad_nd.default": _(r(4, 6, 5), [1, 2], 0.5),
        "aten.index_select.default": _(r(4, 6, 5), 1, i(6, 7)),
        "aten.gather.default": _(r(4, 6, 5), 1, i(6, 4, 3, 5)),
        "aten.scatter_add.default": _(r(4, 6), 1, i(6, 4, 3), r(4, 3)),
        "aten.index_add.default": _(r(4, 6, 5), 1, i(6, 7), r(4, 7, 5)),
        "aten.masked_fill.Scalar": _(r(4, 6), i(2, 4, 6) > 0, -1.0),
        "aten.take_along_dim.default": _(r(4, 6), i(6, 4, 3), 1),
    }


def numeric() -> dict[str, Arguments]:
    """Pointwise operators, products, reductions."""
    return {
        "aten.gelu.default": _(r(4, 6, 5)),
        "aten.silu.default": _(r(4, 6)),
        "aten.glu.default": _(r(4, 6, 8)),
        "aten.add.Tensor": _(r(4, 6, 5), r(6, 1)),
        "aten.mul.Tensor": _(r(4, 6, 5), r(4, 6, 5)),
        "aten.where.self": _(i(2, 4, 6) > 0, r(4, 6), r(6)),
        "aten.clamp.default": _(r(4, 6), -0.5, 0.5),
        "aten.pow.Tensor_Scalar": _(r(4, 6), 3),
        "aten.addcmul.default": _(r(4, 6), r(4, 1), r(6)),
        "aten.mm.default": _(r(4, 6), r(6, 5)),
        "aten.bmm.default": _(r(3, 4, 6), r(3, 6, 5)),
        "aten.matmul.default": _(r(3, 4, 6), r(6, 5)),
        "aten.linear.default": _(r(3, 4, 6), r(5, 6), r(5)),
        "aten.addmm.default": _(r(5), r(4, 6), r(6, 5)),
        "aten.baddbmm.default": _(r(3, 4, 5), r(3, 4, 6), r(3, 6, 5)),
        "aten.einsum.default": _("bij,bjk->bik", [r(3, 4, 6), r(3, 6, 5)]),
        "aten.bilinear.default": _(r(4, 3), r(4, 5), r(6, 3, 5), r(6)),
        "aten.sum.dim_IntList": _(r(4, 6, 5), [1]),
        "aten.nansum.default": _(r(4, 6), [1], True),
        "aten.count_nonzero.dim_IntList": _(r(4, 6, 5), [1]),
        "aten.amax.default": _(r(4, 6, 5), [1]),
        "aten.argmax.default": _(r(4, 6, 5), 1),
        "aten.prod.dim_int": _(r(4, 6, 5), 1),
        "aten.logsumexp.default": _(r(4, 6, 5), [1]),
        "aten.cumsum.default": _(r(4, 6, 5), 1),
        "aten.sort.default": _(r(4, 6, 5), 1),
        "aten.topk.default": _(r(4, 6, 5), 3, 1),
    }


def layers() -> dict[str, Arguments]:
    """Softmax and norms, losses, convolutions and pools, attention."""
    return {
        "aten.softmax.int": _(r(4, 6, 5), 1),
        "aten.log_softmax.int": _(r(4, 6, 5), -1),
        "aten.layer_norm.default": _(r(4, 6, 5), [5], r(5), r(5)),
        "aten.rms_norm.default": _(r(4, 6, 5), [5], r(5)),
        "aten.group_norm.default": _(r(4, 6, 5), 3, r(6), r(6)),
        "aten.mse_loss.default": _(r(4, 6), r(4, 6), 2),
        "aten.l1_loss.default": _(r(4, 6), r(4, 6), 0),
        "aten.cross_entropy_loss.default": _(r(6, 5), i(5, 6), None, 2),
        "aten.conv1d.default": _(r(4, 6, 9), r(5, 6, 3), r(5)),
        "aten.conv2d.default": _(r(4, 6, 5, 5), r(8, 3, 3, 3), r(8), [1, 1], [1, 1], [1, 1], 2),
        "aten.max_pool2d.default": _(r(4, 3, 6, 6), [2, 2]),
        "aten.avg_pool2d.default": _(r(4, 3, 6, 6), [2, 2]),
        "aten.upsample_nearest2d.vec": _(r(4, 3, 5, 5), None, [2.0, 2.0]),
        "aten.pixel_shuffle.default": _(r(4, 8, 3, 5), 2),
        "aten.scaled_dot_product_attention.default": _(r(2, 4, 6, 5), r(2, 4, 7, 5), r(2, 4, 7, 3)),
    }


def hidden() -> dict[str, Arguments]:
    """All of them."""
    return {**moving(), **numeric(), **layers()}
