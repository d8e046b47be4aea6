"""Arguments with which algorithms are proven: target -> forms. Reductions, softmax, norms, distances, embedding."""

from __future__ import annotations

import math

import torch

from tests.ops.cases import Form, form, i, r, special


def statistics() -> dict[str, list[Form]]:
    x = r(4, 6, 3)
    ties = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    gaps = x.clone()
    gaps[0, 1:3] = torch.nan
    gaps[1, :, 2] = torch.nan
    return {
        "aten.mean.default": [form(x)],
        "aten.mean.dim": [form(x, (0, -1)), form(x, (1,), True), form(x, (1,), dtype=torch.float64), form(x, None)],
        "aten.var.default": [form(x)],
        "aten.var.dim": [form(x, (1,), False)],
        "aten.var.correction": [form(x, (0, 2)), form(x, (1,), correction=0, keepdim=True)],
        "aten.std.correction": [form(x, (2,), correction=1), form(torch.ones(2, 4).double(), (1,))],
        "aten.var_mean.correction": [form(x, (0,))],
        "aten.std_mean.correction": [form(x, (0, 1), keepdim=True)],
        "aten.amax.default": [form(x, (1,)), form(x, (0, 2), True), form(ties, (1,)), form(i(9, 5, 4) - 12, (0,))],
        "aten.amin.default": [form(x, (0,)), form(ties, (1,))],
        "aten.max.default": [form(x)],
        "aten.min.default": [form(x)],
        "aten.max.dim": [form(x, 1), form(x, -1, True), form(ties, 1)],
        "aten.min.dim": [form(x, 2, True), form(ties, 1)],
        "aten.max.other": [form(x, r(6, 1))],
        "aten.min.other": [form(x, r(6, 1))],
        "aten.argmax.default": [form(x, 1), form(x), form(ties, 1, True)],
        "aten.argmin.default": [form(x, 0, True)],
        "aten.aminmax.default": [form(x, dim=1), form(x), form(ties, dim=1, keepdim=True)],
        "aten.any.dim": [form(x > 1, 1), form(x > 1, -1, True)],
        "aten.any.default": [form(x > 9), form(x)],
        "aten.any.dims": [form(x > 1, [0, 1])],
        "aten.all.dim": [form(x > -1, 1), form((x > -1).to(torch.uint8), 0)],
        "aten.all.default": [form(x > -9)],
        "aten._is_all_true.default": [form(x > -9), form(x > 0)],
        "aten._is_any_true.default": [form(x > 9), form(x > 0)],
        "aten.all.dims": [form(x > -1, [0, -1], True)],
        "aten.prod.default": [form(x[:2, :3])],
        "aten.prod.dim_int": [form(x, 1), form(x, -1, True), form(x, 0, dtype=torch.float64), form(_zeros(), 1)],
        "aten.nanmean.default": [form(gaps, (1,)), form(gaps), form(gaps, (0, -1), True)],
        "aten.logsumexp.default": [form(x, (0,)), form(x, (1, 2), True), form(r(3, 6) * 400, (1,))],
        "aten.softmax.int": [form(x, -1), form(x, 1, torch.float64), form(_masked(), 1)],
        "aten._softmax.default": [form(x, 0, False)],
        "aten.log_softmax.int": [form(x, -1), form(_masked(), 1)],
        "aten._log_softmax.default": [form(x, 1, False)],
    }


def _zeros() -> torch.Tensor:
    """No zero, one, and several in a row."""
    x = r(3, 5)
    x[1, 2] = 0
    x[2, 1:4] = 0
    return x


def _masked() -> torch.Tensor:
    x = r(3, 6) * 400
    x[:, 1:3] = -torch.inf
    return x


def distances() -> dict[str, list[Form]]:
    x, y = r(4, 6, 3), r(4, 6, 3)
    sparse = _zeros()
    orders = [form(x, order, (1,)) for order in (0, 0.5, 1, 3, math.inf, -math.inf)]
    return {
        "aten.linalg_vector_norm.default": [
            *orders,
            form(x, 3, (0, 2), True),
            form(x, 1, dtype=torch.float64),
            *(form(sparse, order, (1,)) for order in (0.5, 1, 2, 3)),
        ],
        "aten.norm.ScalarOpt_dim": [form(x, 2, (1,)), form(x, None, (-1,), True)],
        "aten.norm.Scalar": [form(x)],
        "aten.linalg_norm.default": [
            form(x),
            form(x, 1, (1,)),
            form(x, None, (1, 2)),
            form(x, math.inf, (1, 2)),
            form(x, 2, (0, -1), True),
            form(r(5), 3),
        ],
        "aten.linalg_norm.ord_str": [form(x, "fro", (1, 2)), form(x, "nuc", (0, 1), True)],
        "aten.linalg_matrix_norm.str_ord": [form(x), form(x, "nuc")],
        "aten.linalg_matrix_norm.default": [form(x, 1), form(x, -math.inf, (0, 1), True)],
        "aten.frobenius_norm.dim": [form(x, [1]), form(x, [0, 2], True)],
        "aten.nuclear_norm.dim": [form(x, [0, 1])],
        "aten.pairwise_distance.default": [
            form(x, y),
            form(x, r(3), 1.0, keepdim=True),
            form(x, r(4, 6, 1), math.inf),
        ],
        "aten.dist.default": [form(x, y), form(r(4, 6), r(6), 3)],
        "aten.cosine_similarity.default": [
            form(x, y, 1),
            form(x, r(6, 3), -1),
            form(x, r(6, 1), 2),
            form(sparse, sparse.new_tensor([[0.0] * 5, [1.0] * 5, [0, 1, 1, 1, 0]]), 1),
        ],
    }


def norms() -> dict[str, list[Form]]:
    x = r(3, 4, 6)
    running = [torch.zeros(4).double(), torch.ones(4).double()]
    planes, rows = r(4, 4, 3, 2), r(5, 4)
    return {
        "aten.layer_norm.default": [
            form(x, (6,), r(6), r(6), 1e-3),
            form(x, (6,), r(6), None),
            form(x, (4, 6), r(4, 6), r(4, 6)),
            form(x, (4, 6)),
        ],
        "aten.native_layer_norm.default": [special((x, (6,), r(6), r(6), 1e-5), unused=(1, 2))],
        "aten.rms_norm.default": [form(x, (4, 6), r(4, 6), None), form(x, (4, 6), None, 1e-3), form(x, (6,), r(6))],
        "aten._fused_rms_norm.default": [special((x, (6,), r(6), 1e-3), unused=(1,))],
        "aten._weight_norm.default": [
            form(x, r(3, 1, 1)),
            form(x, r(1, 4, 1), 1),
            form(x, r(1, 1, 6), 2),
        ],
        "aten.group_norm.default": [
            form(r(3, 8, 4), 4, r(8), r(8), 1e-5),
            form(r(2, 4), 2),
            form(planes, 2, r(4), None),
        ],
        "aten.batch_norm.default": [
            special((values, r(4), r(4), *running, training, 0.1, 1e-5, False), fixed=(3, 4))
            for values in (planes, rows)
            for training in (True, False)
        ]
        + [form(planes, None, None, None, None, True, 0.1, 1e-5, False)],
        "aten.instance_norm.default": [
            form(r(3, 4, 5), r(4), r(4), None, None, True, 0.1, 1e-5, False),
            special((planes, r(4), None, *running, False, 0.1, 1e-5, False), fixed=(2, 3)),
            special((planes, None, None, *running, True, 0.1, 1e-5, False), fixed=(1, 2)),
        ],
    }


def lookups() -> dict[str, list[Form]]:
    ids = i(7, 3, 5)
    ids[0, :2] = 2
    x, mask = r(4, 6, 3), r(4, 6, 3) > 0
    return {
        "aten.embedding.default": [form(r(7, 4), ids, -1), form(r(7, 4), ids, 2), form(r(7, 4), ids, 2, True)],
        "weft.expect": [
            form(x, (torch.tensor(True), torch.tensor([False])), expected=(True, False), places=("here", "there"))
        ],
        "weft.embedding_bag": [
            form(r(7, 4), i(7, 4, 5), None, None, mode=mode, padding_idx=padding)
            for mode in (0, 1, 2)
            for padding in (None, 2)
        ],
        "aten.masked_scatter.default": [
            form(x, mask, r(72)),
            form(x, r(4, 6, 1) > 0, r(24, 3)),
            form(r(3), r(4, 3) > 0, r(4, 3)),
        ],
        "aten._grouped_mm.default": [
            form(r(9, 4), r(4, 4, 6), offs=torch.tensor(ends).int()) for ends in ([2, 7, 7, 9], [1, 3, 6, 8])
        ],
        "aten.take.default": [form(x, i(24, 4, 3))],
        "aten.put.default": [form(x, i(24, 4), r(4), True), form(x, torch.tensor([3, 1]), r(2))],
        "aten.index_reduce.default": [form(x, 1, i(6, 4), r(4, 4, 3), "amax"), form(x, 0, i(4, 2), r(2, 6, 3), "mean")],
    }


def talking_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    groups = (statistics, distances, norms, lookups)
    return {target: forms for group in groups for target, forms in group().items()}
