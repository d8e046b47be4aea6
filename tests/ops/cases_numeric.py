"""Arguments with which the rules of operators that compute are proven: target -> forms of (args, kwargs)."""

from __future__ import annotations

import torch

from tests.ops.cases import Form, form, i, r


def products() -> dict[str, list[Form]]:
    return {
        "aten.linear.default": [
            form(r(2, 3, 4), r(6, 4), r(6)),
            form(r(2, 3, 4), r(6, 4)),
            form(r(4), r(6, 4), bias=r(6)),
            form(r(4, 4), r(4, 4), None),
            form(r(1, 4), r(4, 4), r(4)),
            form(r(3, 4), r(4)),
        ],
        "aten.bilinear.default": [form(r(3, 4), r(3, 2), r(5, 4, 2), r(5)), form(r(3, 4), r(3, 2), r(5, 4, 2), None)],
        "aten.mm.default": [form(r(3, 4), r(4, 6))],
        "aten.bmm.default": [form(r(2, 3, 4), r(2, 4, 6))],
        "aten.matmul.default": [
            form(r(2, 1, 3, 4), r(5, 4, 2)),
            form(r(4), r(4)),
            form(r(4), r(5, 4, 2)),
            form(r(2, 3, 4), r(4)),
            form(r(2, 3, 4), r(4, 6)),
            form(r(3, 4), r(2, 4, 6)),
        ],
        "aten.linalg_matmul.default": [form(r(2, 3, 4), r(2, 4, 6))],
        "aten.mv.default": [form(r(3, 4), r(4))],
        "aten.dot.default": [form(r(4), r(4))],
        "aten.vdot.default": [form(r(4), r(4))],
        "aten.outer.default": [form(r(3), r(4))],
        "aten.ger.default": [form(r(3), r(4))],
        "aten.addmm.default": [
            form(r(6), r(3, 4), r(4, 6)),
            form(r(3, 6), r(3, 4), r(4, 6)),
            form(r(1, 6), r(3, 4), r(4, 6), beta=0.5, alpha=2.0),
            form(r(3, 1), r(3, 4), r(4, 6)),
            form(r(), r(3, 4), r(4, 6)),
        ],
        "aten.addmv.default": [form(r(3), r(3, 4), r(4)), form(r(1), r(3, 4), r(4), alpha=2.0)],
        "aten.addr.default": [form(r(3, 4), r(3), r(4)), form(r(4), r(3), r(4))],
        "aten.baddbmm.default": [
            form(r(2, 3, 6), r(2, 3, 4), r(2, 4, 6)),
            form(r(3, 1), r(2, 3, 4), r(2, 4, 6), beta=0.5),
        ],
        "aten.addbmm.default": [form(r(3, 6), r(2, 3, 4), r(2, 4, 6))],
        "aten.cdist.default": [form(r(2, 3, 4), r(2, 6, 4))],
        "aten.einsum.default": [
            form("bij,bjk->bik", [r(2, 3, 4), r(2, 4, 5)]),
            form("b...d, de -> b...e", [r(2, 3, 4), r(4, 5)]),
            form("ij,jk", [r(3, 4), r(4, 2)]),
            form("ii->i", [r(4, 4)]),
            form("ij,k->ik", [r(3, 4), r(2)]),
            form("...ij,...jk->...ik", [r(2, 1, 3, 4), r(5, 4, 2)]),
            form("bhnd,bhnd,bh->bn", [r(2, 3, 4, 2), r(2, 3, 4, 2), r(2, 3)]),
            form("ij->", [r(3, 4)]),
        ],
        "aten.tensordot.default": [form(r(2, 3, 4), r(4, 3, 5), [1, 2], [1, 0]), form(r(3, 4), r(4, 2), [-1], [0])],
        "aten.inner.default": [form(r(2, 3, 4), r(5, 4)), form(r(4), r(4)), form(r(), r(4, 2))],
    }


def reductions() -> dict[str, list[Form]]:
    x = r(4, 3, 2)
    forms = [form(x, [1], True), form(x, [0, -1]), form(x, None), form(x, []), form(r(4, 1), [1]), form(r(), [])]
    one = [form(x, 1), form(x, -1, True)]
    return {
        "aten.sum.default": [form(x), form(r())],
        "aten.sum.dim_IntList": [*forms, form(x, [1], dtype=torch.float64)],
        "aten.nansum.default": forms[:3],
        "aten.count_nonzero.dim_IntList": [form(x, [1])],
        "aten.count_nonzero.default": [form(x)],
        "aten.sum_to_size.default": [form(r(2, 4, 3), [4, 1]), form(r(4, 3), [4, 3])],
        "aten.median.dim": one,
        "aten.median.default": [form(x)],
        "aten.nanmedian.dim": one,
        "aten.mode.default": [form(x, 1)],
        "aten.kthvalue.default": [form(x, 2, 1)],
        "aten.histc.default": [form(r(4, 3), 5, -2, 2), form(i(6, 8).double(), 6, 0, 5), form(r(4, 3), 3)],
        "aten.cumsum.default": [form(x, 1), form(r(), 0)],
        "aten.cumprod.default": [form(x, -1)],
        "aten.cummax.default": [form(x, 1)],
        "aten.cummin.default": [form(x, 1)],
        "aten.logcumsumexp.default": [form(x, 1)],
        "aten.sort.default": [form(x, 1, True)],
        "aten.sort.stable": [form(x, stable=True, dim=0)],
        "aten.argsort.default": [form(x, 1)],
        "aten.msort.default": [form(x)],
        "aten.topk.default": [form(x, 2, 1), form(x, 3, 1)],
        "aten.diff.default": [form(x, 1, 1)],
        "aten.cross.default": [form(x, r(4, 3, 2), 1), form(x, r(4, 3, 2))],
        "aten.linalg_cross.default": [form(r(4, 3), r(4, 3)), form(x, r(4, 3, 2), dim=1)],
        "aten.linalg_vecdot.default": [form(x, r(4, 3, 2)), form(x, r(4, 3, 2), dim=1)],
    }


def windows() -> dict[str, list[Form]]:
    image = r(2, 4, 6, 6)
    sized = [form(image, [3, 3])]
    return {
        "aten.conv1d.default": [form(r(2, 4, 7), r(6, 4, 3), r(6)), form(r(4, 7), r(6, 4, 3), r(6))],
        "aten.conv1d.padding": [form(r(2, 4, 7), r(6, 4, 3), r(6), [1], "same")],
        "aten.conv2d.default": [
            form(image, r(6, 4, 3, 3), r(6), [2, 2], [1, 1]),
            form(image, r(6, 4, 3, 3)),
            form(image, r(6, 2, 3, 3), r(6), [1, 1], [1, 1], [1, 1], 2),
            form(image, r(8, 1, 3, 3), r(8), [1, 1], [0, 0], [1, 1], 4),
        ],
        "aten.conv2d.padding": [form(image, r(6, 4, 3, 3), None, [1, 1], "valid")],
        "aten.conv3d.default": [form(r(2, 2, 3, 3, 3), r(4, 2, 2, 2, 2), r(4))],
        "aten.conv_transpose1d.default": [form(r(2, 4, 5), r(4, 3, 3), r(6), [1], [0], [0], 2)],
        "aten.conv_transpose2d.input": [form(image, r(4, 6, 3, 3), r(6), [2, 2])],
        "aten.conv_transpose3d.input": [form(r(2, 2, 3, 3, 3), r(2, 4, 2, 2, 2))],
        "aten.convolution.default": [
            form(image, r(6, 4, 3, 3), r(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            form(image, r(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 2),
        ],
        "aten._convolution.default": [
            form(image, r(6, 4, 3, 3), r(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, False, False)
        ],
        "aten.max_pool1d.default": [form(r(2, 4, 6), [2])],
        "aten.max_pool2d.default": [form(image, [2, 2]), form(r(4, 6, 6), [3, 3], [1, 1], [1, 1])],
        "aten.max_pool3d.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten.max_pool1d_with_indices.default": [form(r(2, 4, 6), [2])],
        "aten.max_pool2d_with_indices.default": [form(image, [2, 2])],
        "aten.max_pool3d_with_indices.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten.avg_pool1d.default": [form(r(2, 4, 6), [2])],
        "aten.avg_pool2d.default": [form(image, [2, 2], [1, 1], [1, 1])],
        "aten.avg_pool3d.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten.adaptive_avg_pool1d.default": [form(r(2, 4, 6), [3])],
        "aten.adaptive_avg_pool2d.default": sized,
        "aten.adaptive_avg_pool3d.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten._adaptive_avg_pool2d.default": sized,
        "aten._adaptive_avg_pool3d.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten.adaptive_max_pool1d.default": [form(r(2, 4, 6), [3])],
        "aten.adaptive_max_pool2d.default": sized,
        "aten.adaptive_max_pool3d.default": [form(r(2, 2, 4, 4, 4), [2, 2, 2])],
        "aten.upsample_nearest1d.default": [form(r(2, 4, 3), [6])],
        "aten.upsample_nearest2d.default": [form(image, [9, 12])],
        "aten.upsample_nearest2d.vec": [form(image, None, [2.0, 2.0])],
        "aten.upsample_nearest3d.default": [form(r(2, 2, 2, 2, 2), [4, 4, 4])],
        "aten._upsample_nearest_exact1d.default": [form(r(2, 4, 3), [6])],
        "aten._upsample_nearest_exact2d.default": [form(image, [9, 12])],
        "aten._upsample_nearest_exact3d.default": [form(r(2, 2, 2, 2, 2), [4, 4, 4])],
        "aten.upsample_linear1d.default": [form(r(2, 4, 3), [6], False)],
        "aten.upsample_bilinear2d.default": [form(image, [9, 12], True)],
        "aten.upsample_bilinear2d.vec": [form(image, [9, 12], False, None)],
        "aten.upsample_trilinear3d.default": [form(r(2, 2, 2, 2, 2), [4, 4, 4], False)],
        "aten.upsample_bicubic2d.default": [form(image, [9, 12], False)],
        "aten._upsample_bilinear2d_aa.default": [form(image, [4, 3], False)],
        "aten._upsample_bicubic2d_aa.default": [form(image, [4, 3], False)],
        "aten.im2col.default": [form(image, [2, 2], [1, 1], [0, 0], [2, 2])],
        "aten.col2im.default": [form(r(2, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])],
        "aten.grid_sampler.default": [form(image, torch.rand(2, 4, 3, 2, dtype=torch.float64) * 2 - 1, 0, 0, False)],
        "aten.grid_sampler_2d.default": [form(image, torch.rand(2, 4, 3, 2, dtype=torch.float64) * 2 - 1, 0, 0, False)],
        "aten.grid_sampler_3d.default": [
            form(r(2, 2, 3, 3, 3), torch.rand(2, 2, 3, 2, 3, dtype=torch.float64) * 2 - 1, 0, 0, False)
        ],
    }


def pointwise() -> dict[str, list[Form]]:
    """Forms whose linear sets matter; all other pointwise operators are proven with arguments made from schemas."""
    x, y, mask = r(4, 3), r(4, 3), r(4, 3) > 0
    return {
        "aten.add.Tensor": [
            form(x, y),
            form(x, r(3)),
            form(x, y, alpha=2),
            form(x, 3),
            form(r(4, 1), r(3)),
            form(x, r()),
        ],
        "aten.sub.Tensor": [form(x, y), form(x, 1), form(x, r(4, 1), alpha=3)],
        "aten.rsub.Scalar": [form(x, 2)],
        "aten.rsub.Tensor": [form(x, y)],
        "aten.mul.Tensor": [form(x, y), form(x, 2), form(x, r(3)), form(x, r())],
        "aten.div.Tensor": [form(x, y + 3), form(x, 2)],
        "aten.div.Tensor_mode": [form(x, y + 3, rounding_mode="floor"), form(x, y + 3, rounding_mode=None)],
        "aten.where.self": [form(mask, x, y), form(r(3) > 0, x, r())],
        "aten.where.ScalarOther": [form(mask, x, 0), form(mask, x, 1.0)],
        "aten.where.ScalarSelf": [form(mask, 0.0, x), form(mask, 1.0, x)],
        "aten.masked_fill.Scalar": [form(x, mask, 0), form(x, mask, -1e9), form(r(2, 4, 3), mask, 0.0)],
        "aten.masked_fill.Tensor": [form(x, mask, r())],
        "aten.addcmul.default": [form(x, y, r(3), value=2.0)],
        "aten.addcdiv.default": [form(x, y, r(3).abs() + 1)],
        "aten.lerp.Scalar": [form(x, y, 0.3)],
        "aten.lerp.Tensor": [form(x, y, r(3))],
        "aten.to.dtype": [form(x, torch.float64), form(x, torch.int64)],
        "aten.to.other": [form(x, r(2)), form(x, y)],
        "aten.to.device": [form(x, "cpu", torch.float64)],
        "aten.to.dtype_layout": [form(x, dtype=torch.float64)],
        "aten._to_copy.default": [form(x, dtype=torch.float64)],
        "aten.type_as.default": [form(x, r(2)), form(i(3, 4), y)],
        "aten.clone.default": [form(x)],
        "aten.detach.default": [form(x)],
        "aten.copy.default": [form(i(9, 4, 3), i(9, 4, 3)), form(i(9, 4, 3), i(9, 3)), form(i(9, 4), i(9, 4).int())],
        "aten.fill.Tensor": [form(x, r())],
        "aten.clamp.default": [form(x, -1.0, None)],
        "aten.clip.default": [form(x, -1.0, 1.0)],
        "aten.div.Scalar_mode": [form(x, 2, rounding_mode="trunc")],
        "aten.divide.Scalar_mode": [form(x, 2, rounding_mode="trunc")],
        "aten.divide.Tensor_mode": [form(x, y + 3, rounding_mode="trunc")],
        "aten.clamp.Tensor": [form(x, r(3), None)],
        "aten.pow.Tensor_Scalar": [form(x, 2)],
        "aten.prelu.default": [form(x, r(3)), form(x, r(1))],
        "aten._prelu_kernel.default": [form(x, r(1, 3))],
        "aten.complex.default": [form(x, y)],
    }


def numeric_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    return {target: forms for group in (products, reductions, windows, pointwise) for target, forms in group().items()}
