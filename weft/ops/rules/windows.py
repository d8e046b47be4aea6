"""Convolutions, pools, resampling, Fourier transforms, recurrent layers: what a window, a transform or a state runs
along may not be cut, batch and channels may.

In: an op and its shapes. Out: its rule. A convolution in g groups has channels `(g i)` and `(g o)`: groups, inputs
(summed) and outputs may each be cut, and the local call has as many groups as the cell. Each step of a recurrent layer
needs the whole hidden state and all gates, so only the batch may be cut (dropout between layers never comes here:
capture takes such a layer apart). Torch's kernels refuse empty parts, and so do these rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.ir.graph import Op
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call_with, integers, operands_in, positive
from weft.ops.build import OpView, RuleOf, never_empty, refuse_empty, row, rules_of
from weft.ops.rule import Call, CellView, Rule


def convolution_rule(it: OpView) -> Rule:
    """conv1d, conv2d, conv3d, their transposes, and the general form."""
    transposed = bool(it.args.get("transposed", "transpose" in it.kind))
    plane = "_ " * (len(it.shapes[1]) - 2)
    batch = "b " * (len(it.shape) - len(it.shapes[1]) + 1)
    kernel = "(g i+) o" if transposed else "(g o) i+"
    text = f"{batch} (g i+) {plane}, {kernel} {plane}, &(g o) -> {batch} (g o) {plane}"
    return it.text(text, sizes={"g": int(it.args["groups"])}, linear=((0, 2), (1, 2)), local=local_groups)


def local_groups(op: Op, cell: CellView) -> Call:
    """The op's own call with as many groups as the cell holds."""
    refuse_empty(op, cell, cell.names)
    return call_with(op, groups=count(cell.names["g"])) if "g" in cell.names else call_with(op)


def _plane(it: OpView) -> str:
    """The dims of an operator's window, as rule text."""
    found = next((int(word) for word in it.kind if word.isdigit()), 0)
    assert found, f"{it.kind} does not say how many dims its window has"
    return " ".join("_" * found)


def window_rule(it: OpView) -> Rule:
    """Pools and resampling: every plane by itself, so all dims but the plane's may be cut."""
    side = f"d* {_plane(it)}"
    linear = () if "max" in it.kind else ((0,),)
    return it.text(f"{side} -> {', '.join([side] * len(it.makes))}", linear=linear, local=never_empty)


def unfold_image_rule(it: OpView) -> Rule:
    """im2col and col2im: a dim `(c w)` of channels, each with its window; channels may be cut."""
    window = integers(it.args["kernel_size"])
    if len(window) != 2:
        raise it.error(f"{it.op.target} needs two window sizes")
    sides = ["b* c _ _", f"b* (c {math.prod(window)}) _"]
    source, target = sides if it.kind == "im2col" else reversed(sides)
    return it.text(f"{source} -> {target}", linear=((0,),), local=never_empty)


def _local_affine_grid(op: Op, cell: CellView) -> Call:
    """`size` says the whole batch."""
    size = integers(arguments(op)["size"])
    return call_with(op, size=(cell.output_shape()[0], *size[1:]))


def unpool_rule(it: OpView) -> Rule:
    """max_unpool: values go back to where a pool found them, plane by plane; positions count within a plane."""
    side = f"d* {_plane(it)}"
    return it.text(f"{side}, {side} -> {side}", linear=((0,),), local=never_empty)


def fractional_pool_rule(it: OpView) -> Rule:
    """Pools whose windows are drawn for each row and channel."""
    plane = _plane(it)
    batched = len(it.shape) - plane.count("_") == 2
    lead, samples = ("d0 d1", "d0 d1") if batched else ("d0", "1 d0")
    side = f"{lead} {plane}"
    return it.text(f"{side}, {samples} _ -> {', '.join([side] * len(it.makes))}", local=never_empty)


def fourier_rule(it: OpView) -> Rule:
    """fft and its kin in one, two or n dims, and the shifts that go with them; linear in the signal."""
    num_dims = len(it.shape)
    # as many of the last dims as lengths are given, else all
    first = num_dims - (len(integers(it.args.get("s"))) or num_dims)
    moved = [positive(i, num_dims) for i in integers(it.args["dim"]) or range(first, num_dims)]
    return it.beside(moved, linear=[[0]], local=never_empty)


def frames_rule(it: OpView) -> Rule:
    """stft and istft: signals of a batch by themselves; a window stays whole."""
    signal = it.result if it.kind == "istft" else it.shape
    side = "b _*" if len(signal) == 2 else "_*"
    return it.text(f"{side}, _ -> {side}", linear=((0,),), local=never_empty)


def layer_rule(it: OpView) -> Rule:
    """lstm, gru, rnn: `s b i` (or `b s i`), states `l b h`, weights whole; without a batch dim, one sequence."""
    if "batch_sizes" in it.args:
        raise it.error(
            f"{it.op.target} of packed sequences: how many rows each step has is not known before the run",
            "give padded sequences, or keep the op copied: plan.trans(op, copy(...))",
        )
    batched = len(it.shape) == 3
    state = "_ b _" if batched else "_*"
    layer = "b _ _" if batched and it.args["batch_first"] else state
    return _recurrent(it, layer, state)


def cell_rule(it: OpView) -> Rule:
    """lstm_cell, gru_cell, rnn_tanh_cell: one step of rows `b`."""
    side = "b _" if len(it.shape) > 1 else "_*"
    return _recurrent(it, side, side)


def _recurrent(it: OpView, first: str, state: str) -> Rule:
    """The input and the first output have the dims `first`, the states `state`."""
    num_states = len(operands_in(it.args["hx"]))
    weights = ["_*"] * (len(it.operands) - 1 - num_states)
    inputs, outputs = [first, *[state] * num_states, *weights], [first, *[state] * (len(it.makes) - 1)]
    return it.text(f"{', '.join(inputs)} -> {', '.join(outputs)}", local=never_empty)


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"
_WINDOWS = """
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_TRANSFORMS = """
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift
"""

RULES: Mapping[str, RuleOf] = {
    **rules_of(convolution_rule, _CONVOLUTIONS),
    **rules_of(window_rule, _WINDOWS),
    **rules_of(unfold_image_rule, "im2col col2im"),
    **rules_of(
        row("b c _*, b d* _ -> b c d*", (0,), local=never_empty), "grid_sampler grid_sampler_2d grid_sampler_3d"
    ),
    "aten.affine_grid_generator": row("b _* -> b _*", (0,), local=_local_affine_grid),
    **rules_of(unpool_rule, "max_unpool2d max_unpool3d"),
    **rules_of(fractional_pool_rule, "fractional_max_pool2d fractional_max_pool3d"),
    "aten.conv_tbc": row("_ b i+, _ i+ o, &o -> _ b o", (0, 2), (1, 2), local=never_empty),
    **rules_of(fourier_rule, _TRANSFORMS),
    **rules_of(frames_rule, "stft istft"),
    **rules_of(layer_rule, "lstm gru rnn_tanh rnn_relu"),
    **rules_of(cell_rule, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
}
"""Rules by operator."""
