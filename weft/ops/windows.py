"""Convolutions, pools and resampling: batch and channels may be cut, the dims a window slides over may not.

In: an op and its shapes. Out: its rule. A convolution in g groups has channels `(g i)` and `(g o)`: groups, inputs
(summed) and outputs may each be cut, and the local call has as many groups as the cell.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Op, Tensor
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call_with, integers, operand
from weft.ops.build import build, fixed, named, numbered_dims, product_dim
from weft.ops.rule import Call, CellView, Dims, Rule, RuleOf


def convolution_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """conv1d, conv2d, conv3d, their transposes, and the general form."""
    values = arguments(op)
    groups = int(values["groups"])
    transposed = bool(values.get("transposed", "transpose" in op.kind))
    image, weight = reads[0].sizes, reads[1].sizes
    num_spatial = len(weight) - 2
    channels_in, channels_out = image[-num_spatial - 1], makes[0].sizes[-num_spatial - 1]
    sizes = {"g": groups, "i": channels_in // groups, "o": channels_out // groups}
    reads_in, reads_out = (product_dim("g", name, sizes=sizes) for name in "io")
    batch = tuple(named("b", size) for size in image[: -num_spatial - 1])
    source = (*batch, reads_in, *map(fixed, image[-num_spatial:]))
    target = (*batch, reads_out, *map(fixed, makes[0].sizes[-num_spatial:]))
    first, second = (
        (reads_in, product_dim("o", sizes=sizes)) if transposed else (reads_out, product_dim("i", sizes=sizes))
    )
    kernel = (first, second, *map(fixed, weight[2:]))
    bias = operand(values["bias"])
    inputs: list[Dims] = [source, kernel]
    if bias is not None:
        inputs.append((reads_out,))
    added = () if bias is None else (bias,)
    linear = [[0, *added], [1, *added]]
    return build(
        inputs, [target], reads, makes, sizes=sizes, summed="i", added=added, linear=linear, local=_local_convolution
    )


def local_window(op: Op, cell: CellView) -> Call:
    """The op's own call. Torch's kernels refuse empty parts, or answer in the wrong shape."""
    empty = [name for name, ranges in cell.names.items() if not count(ranges)]
    if empty:
        raise RuleError(
            f"{op.kind} cannot run on a part that holds nothing of {empty[0]!r}",
            place=op.place,
            remedy="cut it into fewer parts, or give each part a share",
        )
    return call_with(op, {})


def _local_convolution(op: Op, cell: CellView) -> Call:
    local_window(op, cell)
    return call_with(op, {"groups": count(cell.names["g"])} if "g" in cell.names else {})


def window_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Pools and resampling: every plane by itself, so all dims but the plane's may be cut."""
    num_spatial = _num_spatial(op)
    shape, result = reads[0].sizes, makes[0].sizes
    lead = numbered_dims(shape[:-num_spatial])
    source = (*lead, *map(fixed, shape[-num_spatial:]))
    target = (*lead, *map(fixed, result[-num_spatial:]))
    linear = [] if "max" in op.kind else [[0]]
    return build([source], [target] * len(makes), reads, makes, linear=linear, local=local_window)


def _num_spatial(op: Op) -> int:
    found = next((int(word) for word in op.kind if word.isdigit()), 0)
    assert found, f"{op.kind} does not say how many dims its window has"
    return found


def unfold_image_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """im2col and col2im: a dim `(c w)` of channels, each with its window; channels may be cut."""
    window = 1
    for size in integers(arguments(op)["kernel_size"]):
        window *= size
    columns, image = (makes[0], reads[0]) if op.kind == "im2col" else (reads[0], makes[0])
    if len(integers(arguments(op)["kernel_size"])) != 2:
        raise RuleError(f"{op.target} needs two window sizes", place=op.place)
    sizes = {"c": image.sizes[-3]}
    lead = numbered_dims(image.sizes[:-3], "b")
    channels = product_dim("c", sizes=sizes)
    plain = (*lead, channels, *map(fixed, image.sizes[-2:]))
    unfolded = (*lead, product_dim("c", window, sizes=sizes), fixed(columns.sizes[-1]))
    sides = (plain, unfolded) if op.kind == "im2col" else (unfolded, plain)
    return build(sides[:1], sides[1:], reads, makes, sizes=sizes, linear=[[0]], local=local_window)


def grid_sample_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Batch and channels of the image; batch and all positions of the grid."""
    shape = makes[0].sizes
    b, c = named("b", shape[0]), named("c", shape[1])
    places = numbered_dims(shape[2:])
    image = (b, c, *map(fixed, reads[0].sizes[2:]))
    grid = (b, *places, fixed(reads[1].sizes[-1]))
    return build([image, grid], [(b, c, *places)], reads, makes, linear=[[0]], local=local_window)


def affine_grid_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """A grid of positions for each row's matrix; `size` says the whole batch."""
    b = named("b", reads[0].sizes[0])
    source, target = ((b, *map(fixed, tensor.sizes[1:])) for tensor in (reads[0], makes[0]))
    return build([source], [target], reads, makes, linear=[[0]], local=_local_affine_grid)


def _local_affine_grid(op: Op, cell: CellView) -> Call:
    size = integers(arguments(op)["size"])
    return call_with(op, {"size": (cell.output_shape()[0], *size[1:])})


def unpool_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """max_unpool: values go back to where a pool found them, plane by plane; positions count within a plane."""
    num_spatial = _num_spatial(op)
    lead = numbered_dims(reads[0].sizes[:-num_spatial])
    sides = [(*lead, *map(fixed, tensor.sizes[-num_spatial:])) for tensor in (*reads, *makes)]
    return build(sides[:2], sides[2:], reads, makes, linear=[[0]], local=local_window)


def fractional_pool_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Pools whose windows are drawn for each row and channel."""
    num_spatial = _num_spatial(op)
    lead = numbered_dims(reads[0].sizes[:-num_spatial])
    source, *targets = ((*lead, *map(fixed, tensor.sizes[-num_spatial:])) for tensor in (reads[0], *makes))
    samples = (*(lead if len(lead) == 2 else (fixed(1), *lead)), fixed(reads[1].sizes[-1]))
    return build([source, samples], targets, reads, makes, local=local_window)


def conv_tbc_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`t b i, w i o, o -> t b o`."""
    image, weight = reads[0].sizes, reads[1].sizes
    b, i, o = (named(name, size) for name, size in zip("bio", (image[1], *weight[1:]), strict=True))
    inputs: list[Dims] = [(fixed(image[0]), b, i), (fixed(weight[0]), i, o), (o,)]
    linear = [[0, 2], [1, 2]]
    target = (fixed(makes[0].sizes[0]), b, o)
    return build(inputs, [target], reads, makes, summed=i.names, added=[2], linear=linear, local=local_window)


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"
_WINDOWS = """
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""

WINDOWS: Mapping[str, RuleOf] = {
    **{f"aten.{name}": convolution_rule for name in _CONVOLUTIONS.split()},
    **{f"aten.{name}": window_rule for name in _WINDOWS.split()},
    **dict.fromkeys(("aten.im2col", "aten.col2im"), unfold_image_rule),
    **dict.fromkeys(("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d"), grid_sample_rule),
    "aten.affine_grid_generator": affine_grid_rule,
    **dict.fromkeys(("aten.max_unpool2d", "aten.max_unpool3d"), unpool_rule),
    **dict.fromkeys(("aten.fractional_max_pool2d", "aten.fractional_max_pool3d"), fractional_pool_rule),
    "aten.conv_tbc": conv_tbc_rule,
}
"""Computed rules, by family."""
