"""Arguments with which the rules of operators that move data are proven: target -> forms of (args, kwargs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Form(tuple[tuple[Any, ...], dict[str, Any]]):
    """(args, kwargs) of one call.

    Args:
        fixed: operands that get no gradient, by position among the tensors.
        unused: outputs that reach no loss.
        draw: the number of a random draw.
    """

    fixed: tuple[int, ...]
    unused: tuple[int, ...]
    draw: int | None


def r(*sizes: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(sizes, dtype=torch.float64)


def i(high: int, *sizes: int) -> torch.Tensor:
    """Random indices below `high`."""
    return torch.randint(high, sizes)


def form(*args: Any, **kwargs: Any) -> Form:
    return special(args, kwargs)


def special(
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    fixed: tuple[int, ...] = (),
    unused: tuple[int, ...] = (),
    draw: int | None = None,
) -> Form:
    """A form about which there is more to say."""
    made = Form((tuple(args), kwargs or {}))
    made.fixed, made.unused, made.draw = fixed, unused, draw
    return made


END = 2**63 - 1


def reshapes() -> dict[str, list[Form]]:
    shapes = [
        ((2, 3, 8), [2, 3, 4, 2]),
        ((2, 3, 4, 2), [2, 3, 8]),
        ((6, 4), [4, 6]),
        ((4, 30), [6, 20]),
        ((12,), [2, -1, 3]),
        ((4, 2, 6), [-1]),
        ((1, 4, 1, 3), [4, 3, 1]),
        ((3, 1, 2, 2), [3, 4]),
        ((8, 9), [6, 12]),
        ((), [1, 1]),
        ((0, 4), [4, 0]),
    ]
    forms = [form(r(*source), target) for source, target in shapes]
    forms.append(form(r(4, 2, 3).transpose(0, 1).contiguous(), [8, 3]))
    return {
        "aten.view.default": [*forms, form(r(2, 4).transpose(0, 1), [2, 2, 2])],
        "aten.view.dtype": [form(i(9, 4, 2), torch.float64), form(i(9, 4, 2), torch.int32)],
        "aten.view_copy.default": forms[:3],
        "aten.reshape.default": forms,
        "aten._unsafe_view.default": forms[:4],
        "aten._reshape_alias.default": [form(r(4, 6), [4, 2, 3], [6, 3, 1])],
        "aten.view_as.default": [form(r(4, 6), r(4, 2, 3))],
        "aten.reshape_as.default": [form(r(4, 6), r(4, 2, 3))],
        "aten.flatten.using_ints": [form(r(2, 3, 4), 1), form(r(2, 3, 4)), form(r(2, 3, 4, 2), 1, 2)],
        "aten.unflatten.int": [form(r(4, 6), 1, [3, 2]), form(r(12, 2), 0, [-1, 3])],
        "aten.ravel.default": [form(r(4, 3))],
        "aten.squeeze.default": [form(r(1, 4, 1, 3))],
        "aten.squeeze.dim": [form(r(4, 1, 3), 1), form(r(4, 2), 0), form(r(4, 1), -1)],
        "aten.squeeze.dims": [form(r(4, 1, 3, 1), [1, 3])],
        "aten.squeeze_copy.dim": [form(r(4, 1, 3), 1)],
        "aten.unsqueeze.default": [form(r(4, 3), 1), form(r(4, 3), -1)],
        "aten.unsqueeze_copy.default": [form(r(4, 3), 1)],
        "aten.atleast_1d.default": [form(r()), form(r(4))],
        "aten.atleast_2d.default": [form(r(4))],
        "aten.atleast_3d.default": [form(r(4, 2))],
    }


def views() -> dict[str, list[Form]]:
    return {
        "aten.permute.default": [form(r(2, 3, 4), [2, 0, 1]), form(r(2, 3), [-1, 0])],
        "aten.permute_copy.default": [form(r(2, 3, 4), [2, 0, 1])],
        "aten.transpose.int": [form(r(2, 3, 4), 1, -1), form(r(2, 1), 0, 1)],
        "aten.transpose_copy.int": [form(r(2, 3, 4), 1, -1)],
        "aten.t.default": [form(r(3, 4)), form(r(4))],
        "aten.t_copy.default": [form(r(3, 4))],
        "aten.numpy_T.default": [form(r(2, 3, 4))],
        "aten.mT.default": [form(r(2, 3, 4))],
        "aten.mH.default": [form(r(2, 3, 4))],
        "aten.matrix_H.default": [form(r(3, 4))],
        "aten.adjoint.default": [form(r(2, 3, 4))],
        "aten.movedim.int": [form(r(2, 3, 4), 0, -1)],
        "aten.movedim.intlist": [form(r(2, 3, 4), [0, 1], [1, 2])],
        "aten.moveaxis.int": [form(r(2, 3, 4), 0, -1)],
        "aten.swapaxes.default": [form(r(2, 3, 4), 0, 2)],
        "aten.swapdims.default": [form(r(2, 3, 4), 0, 2)],
        "aten.expand.default": [
            form(r(4, 1, 3), [2, 4, 5, -1]),
            form(r(3), [4, 3]),
            form(r(), [4]),
            form(r(1, 3), [1, 3]),
        ],
        "aten.expand_copy.default": [form(r(4, 1), [4, 3])],
        "aten.expand_as.default": [form(r(4, 1, 3), r(2, 4, 5, 3))],
        "aten.broadcast_to.default": [form(r(3), [4, 3])],
        "aten.broadcast_tensors.default": [form([r(4, 1), r(3), r()])],
        "aten.unfold.default": [form(r(4, 7), 1, 3, 2), form(r(7, 4), 0, 2, 1), form(r(), 0, 1, 1)],
        "aten.unfold_copy.default": [form(r(4, 7), 1, 3, 2)],
        "aten.diagonal.default": [form(r(4, 3, 3), 0, 1, 2), form(r(3, 4, 3), 1, 0, -1)],
        "aten.diagonal_copy.default": [form(r(4, 3, 3), 0, 1, 2)],
        "aten.linalg_diagonal.default": [form(r(4, 3, 3))],
        "aten.as_strided.default": [form(r(4, 3), [2, 2], [3, 1], 1)],
        "aten.as_strided_copy.default": [form(r(4, 3), [2, 2], [3, 1], 1)],
        "aten.view_as_real.default": [form(torch.complex(r(4, 3), r(4, 3)))],
        "aten.view_as_real_copy.default": [form(torch.complex(r(4, 3), r(4, 3)))],
        "aten.view_as_complex.default": [form(r(4, 3, 2))],
    }


def pieces() -> dict[str, list[Form]]:
    slices = [
        form(r(4, 12), 1, 4, 8),
        form(r(4, 12), 1, 0, 8),
        form(r(4, 12), 1, -4, END),
        form(r(4, 12), 1, 1, END, 2),
        form(r(4, 12), 1, 0, END, 5),
        form(r(4, 13), 1, 0, -1, 2),
        form(r(4, 12), 1, 1, 6, 2),
        form(r(4, 12), 1, 0, 0, 3),
        form(r(4, 12), 1, 1, END),
        form(r(4, 12), 1, 0, END),
        form(r(4, 12), 1, 12, END),
        form(r(8, 3), 0, 2, 6),
        form(r(4, 3)),
        form(r(4, 12), 1, None, 6),
    ]
    return {
        "aten.slice.Tensor": slices,
        "aten.slice_copy.Tensor": slices[:4],
        "aten.narrow.default": [form(r(4, 12), 1, 4, 8), form(r(4, 12), 1, -4, 4)],
        "aten.narrow_copy.default": [form(r(4, 12), 1, 4, 8)],
        "aten.select.int": [form(r(4, 3, 2), 1, -1), form(r(4), 0, 2)],
        "aten.select_copy.int": [form(r(4, 3, 2), 1, -1)],
        "aten.slice_scatter.default": [form(r(4, 8), r(4, 3), 1, 2, 5)],
        "aten.select_scatter.default": [form(r(4, 8), r(4), 1, 2)],
        "aten.split.Tensor": [form(r(4, 12), 4, 1), form(r(4, 12), 5, -1), form(r(4, 10), 4, 1), form(r(4, 3), 3, 1)],
        "aten.split.sizes": [form(r(4, 12), [8, 4], 1)],
        "aten.split_copy.Tensor": [form(r(4, 12), 4, 1)],
        "aten.split_with_sizes.default": [
            form(r(4, 12), [8, 2, 2], 1),
            form(r(12, 2), [6, 6]),
            form(r(4, 12), [5, 7], -1),
            form(r(4, 4), [4, 0], 1),
        ],
        "aten.split_with_sizes_copy.default": [form(r(4, 12), [8, 2, 2], 1)],
        "aten.unsafe_split.Tensor": [form(r(4, 12), 4, 1)],
        "aten.unsafe_split_with_sizes.default": [form(r(4, 12), [8, 4], 1)],
        "aten.chunk.default": [form(r(4, 12), 3, 1), form(r(4, 12), 5, -1)],
        "aten.unsafe_chunk.default": [form(r(4, 12), 3, 1)],
        "aten.tensor_split.sections": [form(r(4, 10), 4, 1), form(r(8, 3), 2)],
        "aten.tensor_split.indices": [form(r(4, 10), [4, 6], 1)],
        "aten.hsplit.int": [form(r(4, 6), 2), form(r(8), 2)],
        "aten.vsplit.int": [form(r(8, 6), 2)],
        "aten.dsplit.int": [form(r(3, 2, 8), 2)],
        "aten.unbind.int": [form(r(3, 4), 0), form(r(4, 3, 2), -2)],
        "aten.unbind_copy.int": [form(r(3, 4), 0)],
        "aten.cat.default": [
            form([r(4, 8), r(4, 8)], 1),
            form([r(4, 8), r(4, 4), r(4, 4)], -1),
            form([r(4, 3), r(4, 5)], 1),
            form([r(4, 3)], 0),
            form([r(0), r(4, 2)], 1),
            form([r(4, 0), r(4, 2)], 1),
        ],
        "aten.concat.default": [form([r(4, 8), r(4, 8)], 1)],
        "aten.concatenate.default": [form([r(4, 8), r(4, 8)], 1)],
        "aten.stack.default": [form([r(4, 3), r(4, 3)], 1), form([r(4), r(4), r(4)], -1), form([r(), r()])],
        "aten.repeat.default": [form(r(4, 3), [2, 2, 3]), form(r(1, 3), [4, 1]), form(r(4), [1]), form(r(), [4])],
        "aten.tile.default": [form(r(4, 3), [2, 2, 3]), form(r(4, 3), [2])],
        "aten.repeat_interleave.self_int": [
            form(r(4, 3), 2, 1),
            form(r(4, 3), 2),
            form(r(4, 3), 1, 0),
            form(r(1, 4), 3, 0),
        ],
        "aten.repeat_interleave.self_Tensor": [form(r(4, 3), torch.tensor([1, 2, 0]), 1)],
        "aten.pad.default": [
            form(r(4, 3), [1, 2]),
            form(r(4, 3), [0, 0, 1, 0], "constant", 2.0),
            form(r(4, 2, 5), [2, 1], "reflect"),
            form(r(4, 3), [1, -1]),
        ],
        "aten.constant_pad_nd.default": [form(r(4, 3), [1, 2], 0), form(r(4, 3), [1, 2], 1.5), form(r(4, 3), [0, 0])],
        "aten.reflection_pad1d.default": [form(r(4, 2, 5), [2, 1])],
        "aten.reflection_pad2d.default": [form(r(4, 2, 5, 5), [2, 1, 0, 0])],
        "aten.reflection_pad3d.default": [form(r(2, 2, 3, 3, 3), [1, 1, 1, 0, 0, 0])],
        "aten.replication_pad1d.default": [form(r(4, 2, 5), [2, 1])],
        "aten.replication_pad2d.default": [form(r(4, 2, 5, 5), [2, 1, 1, 1])],
        "aten.replication_pad3d.default": [form(r(2, 2, 3, 3, 3), [1, 1, 1, 0, 0, 0])],
        "aten.flip.default": [form(r(4, 3, 2), [1]), form(r(4, 3), [-1, 0])],
        "aten.fliplr.default": [form(r(4, 3, 2))],
        "aten.flipud.default": [form(r(4, 3))],
        "aten.roll.default": [form(r(4, 3), [1], [1]), form(r(4, 3), [1])],
        "aten.tril.default": [form(r(2, 4, 4)), form(r(2, 3, 4), 1)],
        "aten.triu.default": [form(r(2, 4, 4), -1)],
        "aten.meshgrid.default": [form([r(4), r(3), r(2)])],
        "aten.meshgrid.indexing": [form([r(4), r(3)], indexing="xy"), form([r(4), r()], indexing="ij")],
        "aten.glu.default": [form(r(4, 8), 1), form(r(8, 3), 0), form(r(4, 2), -1)],
        "aten.pixel_shuffle.default": [form(r(2, 8, 3, 2), 2), form(r(4, 3, 2), 2)],
        "aten.pixel_unshuffle.default": [form(r(2, 2, 4, 6), 2)],
    }


def indexing() -> dict[str, list[Form]]:
    x, rows = r(5, 4, 6), i(4, 2, 4)
    return {
        "aten.index.Tensor": [
            form(x, [None, rows]),
            form(x, [i(5, 3, 1), i(4, 4)]),
            form(x, [i(5, 4), None, i(6, 4)]),
            form(x, [None, None, i(6, 3)]),
            form(x, [i(5)]),
        ],
        "aten._unsafe_index.Tensor": [form(x, [None, rows])],
        "aten.index_put.default": [
            form(x, [x > 0], r()),
            form(x, [x[..., 0] > 0], r(1, 6)),
            form(x, [None, x[0, :, 0] > 0], r(5, 1, 6), True),
            form(x, [None, x[0] > 0], r(5, 1)),
            form(x, [None, torch.tensor([2, 0, 1, 3])], r(5, 4, 6)),
            form(x, [i(5, 4), i(4, 4)], r(4, 6), True),
            form(x, [i(5, 4), i(4, 4)], r(6), True),
            form(x, [i(5, 4), None, i(6, 4)], r(4, 4), True),
        ],
        "aten._unsafe_index_put.default": [form(x, [i(5, 4), i(4, 4)], r(4, 6), True)],
        "aten.gather.default": [form(x, 1, i(4, 5, 8, 6)), form(x, -1, i(6, 5, 2, 4)), form(r(4, 6), 1, i(6, 4, 1))],
        "aten.take_along_dim.default": [form(x, i(4, 5, 8, 6), 1), form(x, i(4, 1, 8, 1), 1)],
        "aten.scatter.src": [form(x, 1, _places(5, 4, 6), r(5, 4, 6))],
        "aten.scatter.value": [form(x, 1, i(4, 5, 2, 6), 2.0), form(x, 2, i(6, 3, 4, 1), 1.0)],
        "aten.scatter_add.default": [
            form(x, 1, i(4, 5, 8, 6), r(5, 8, 6)),
            form(x, 0, i(5, 4, 4, 3), r(4, 4, 3)),
            form(i(9, 5, 4, 6), 0, i(5, 4, 4, 6), i(9, 6, 4, 6)),
        ],
        "aten.scatter.reduce": [form(i(9, 5, 4, 6), 1, i(4, 5, 8, 6), i(9, 5, 8, 6), reduce="add")],
        "aten.scatter.value_reduce": [form(i(9, 5, 4, 6), 1, i(4, 5, 8, 6), 2, reduce="add")],
        "aten.scatter_reduce.two": [
            form(x, 1, i(4, 5, 8, 6), r(5, 8, 6), "sum"),
            form(x, 1, i(4, 5, 8, 6), r(5, 8, 6), "sum", include_self=False),
            form(x, 1, i(4, 5, 8, 6), r(5, 8, 6), "mean"),
            form(x, 1, i(4, 5, 8, 6), r(5, 8, 6), "amax"),
        ],
        "aten.index_select.default": [form(x, 1, i(4, 8)), form(x, -1, i(6, 3)), form(x, 0, i(5))],
        "aten.index_add.default": [form(x, 1, i(4, 8), r(5, 8, 6)), form(x, 0, i(5, 4), r(4, 4, 6), alpha=2)],
        "aten.index_copy.default": [form(x, 1, torch.tensor([3, 1]), r(5, 2, 6))],
        "aten.index_fill.int_Scalar": [form(x, 1, torch.tensor([3, 1]), 2.0)],
        "aten.index_fill.int_Tensor": [form(x, 1, torch.tensor([3, 1]), r())],
        "aten.one_hot.default": [form(i(3, 4, 2), 5), form(torch.tensor([0, 2, 1, 0]), -1)],
        "aten.bucketize.Tensor": [form(r(4, 3), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))],
        "aten.searchsorted.Tensor": [
            form(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), r(4, 3)),
            form(r(4, 3, 5).sort(-1).values, r(4, 3, 6), right=True),
            form(r(4, 5), r(4, 2), sorter=torch.arange(5).expand(4, 5).contiguous()),
        ],
        "aten.searchsorted.Scalar": [form(r(5).sort().values, 0.5)],
        "aten.isin.Tensor_Tensor": [form(i(5, 4, 3), torch.tensor([1, 3])), form(i(5, 4), i(5, 4))],
    }


def _places(a: int, b: int, c: int) -> torch.Tensor:
    """Distinct places along dim 1, so that the result does not depend on the order of writing."""
    return torch.rand(a, b, c).argsort(dim=1)


def creation() -> dict[str, list[Form]]:
    kind = {"dtype": torch.float64}
    return {
        "aten.zeros.default": [form([4, 3], **kind)],
        "aten.ones.default": [form([4, 3], **kind)],
        "aten.full.default": [form([4, 3], 2.5, **kind), form([], 1.0, **kind)],
        "aten.empty.memory_format": [form([0, 3], **kind)],
        "aten.new_zeros.default": [form(r(4, 3), [4, 3]), form(r(2), [4, 3])],
        "aten.new_ones.default": [form(r(4, 3), [4, 3])],
        "aten.new_full.default": [form(r(4, 3), [4, 3], 2.0)],
        "aten.new_empty.default": [form(r(4, 3), [0, 3])],
        "aten.zeros_like.default": [form(r(4, 3))],
        "aten.ones_like.default": [form(r(4, 3), dtype=torch.int64)],
        "aten.full_like.default": [form(r(4, 3), 2.0)],
        "aten.empty_like.default": [form(r(4, 0))],
        "aten.arange.start_step": [form(1, 9, 2)],
        "aten.arange.default": [form(4)],
        "aten.arange.start": [form(1, 4)],
        "aten.linspace.default": [form(0.0, 1.0, 4, **kind)],
        "aten.logspace.default": [form(0.0, 1.0, 4, **kind)],
        "aten.eye.default": [form(4, **kind)],
        "aten.scalar_tensor.default": [form(2.0, **kind)],
        "aten.tril_indices.default": [form(3, 3)],
        "aten.triu_indices.default": [form(3, 3)],
        "aten.range.step": [form(0, 3)],
        "aten.hann_window.default": [form(4)],
        "aten.hamming_window.default": [form(4)],
    }


def moving_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    return {
        target: forms for group in (reshapes, views, pieces, indexing, creation) for target, forms in group().items()
    }
