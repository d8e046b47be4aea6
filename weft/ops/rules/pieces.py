"""Operators that take a tensor apart along a dim or put it together: slice, split, cat, stack, repeat, pad, flip.

In: an op and its shapes. Out: its rule, names after the output's dims. Pieces of one dim have a common unit, the
greatest common divisor of their sizes: a fused projection of widths 4u, u, u is `[(n 4) | n | n]`, and each part of n
holds its share of every piece. So a split is as cuttable as the thing that was fused. Local calls state local sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.ir.graph import Op, Ref
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call, integers, positive
from weft.ops.build import OpView, RuleOf, fixed_dims, named, numbered_dims, replaced, rules_of
from weft.ops.rule import Call, CellView, Dim, Dims, Factor, Rule, dim, fixed
from weft.ops.rules.windows import local_groups

_END = 2**62
"""Beyond any index: "to the end"."""


def pieces_of(name: str, sizes: Sequence[int]) -> tuple[Dim, tuple[Dim, ...], dict[str, int]]:
    """A dim made of consecutive pieces: the whole, each piece, and the size of the name, which is the common unit.

    >>> [str(one) for one in (pieces_of("n", (8, 2, 2))[0], *pieces_of("n", (8, 2, 2))[1])]
    ['[(n 4) | n | n]', '(n 4)', 'n', 'n']
    >>> str(pieces_of("n", (4, 4, 4))[0])
    '(3 n)'
    """
    unit = math.gcd(*sizes)
    if unit <= 1:
        return fixed(sum(sizes)), tuple(map(fixed, sizes)), {}
    parts = tuple(dim(0) if not size else dim(name) if size == unit else dim(name, size // unit) for size in sizes)
    held = [part for part, size in zip(parts, sizes, strict=True) if size]
    if len(set(held)) == 1:
        return dim(*((len(held),) if len(held) > 1 else ()), *held[0].products[0]), parts, {name: unit}
    return Dim(tuple(part.products[0] for part in held)), parts, {name: unit}


def slice_rule(it: OpView) -> Rule:
    """slice, narrow. The sliced dim may be cut in units common to what is taken and what is left."""
    if isinstance(it.args["start"], Ref):
        raise it.error(f"{it.op.target}: the first index is a tensor, so what is taken is not known before the run")
    at, start, step = _slice_arguments(it.op, it.shape)
    size, taken = it.shape[at], it.result[at]
    name = f"d{at}"
    target = numbered_dims(it.result)
    source, taken_dim, sizes = fixed(size), fixed(taken), dict[str, int]()
    if step == 1 and taken > 0:
        source, (_, taken_dim, _), sizes = pieces_of(name, (start, taken, size - start - taken))
    elif size == taken * step and taken > 1:  # every cell keeps one of each run of `step` indices
        source, taken_dim, sizes = dim(name, step), dim(name), {name: taken}
    inputs = [replaced(target, at, source), *fixed_dims(*it.reads[1:])]
    outputs = [replaced(target, at, taken_dim)]
    return it.rule(inputs, outputs, sizes=sizes, linear=[[0]], local=_local_slice, source="view")


def _slice_arguments(op: Op, shape: Sequence[int]) -> tuple[int, int, int]:
    """The dim, the first index and the step."""
    values = arguments(op)
    at = positive(values["dim"], len(shape))
    start = int(values["start"] or 0)
    start = max(start + shape[at], 0) if start < 0 else min(start, shape[at])
    return at, start, int(values.get("step", 1))


def _local_slice(op: Op, cell: CellView) -> Call:
    at, start, step = _slice_arguments(op, cell.whole_inputs[0])
    taken, whole = count(cell.outputs[0][at]), cell.whole_outputs[0][at]
    if step > 1:
        # a slice may end before the dim does; then that dim is whole in every cell
        to_the_end = whole == -(-(cell.whole_inputs[0][at] - start) // step)
        end = _END if to_the_end else start + max(0, (taken - 1) * step + 1)
        return call("aten.slice.Tensor", Ref("0"), at, start, end, step)
    # pieces of one dim are cut in the same proportion
    before = start * taken // whole if whole else start
    return call("aten.slice.Tensor", Ref("0"), at, before, before + taken, 1)


def select_rule(it: OpView) -> Rule:
    """select, unbind: one index of a dim, or one output for each; nobody may cut it."""
    at = positive(it.args["dim"], len(it.shape))
    target = numbered_dims(it.result)
    source = (*target[:at], fixed(it.shape[at]), *target[at:])
    return it.rule([source], [target] * len(it.makes), linear=[[0]], source="view")


def scatter_piece_rule(it: OpView) -> Rule:
    """slice_scatter, select_scatter: the written dim may not be cut."""
    at = positive(it.args["dim"], len(it.result))
    target, shape = numbered_dims(it.result, whole=(at,)), it.shapes[1]
    written = replaced(target, at, *map(fixed, shape[at : at + len(shape) - len(target) + 1]))
    return it.rule([target, written], [target], linear=[[0, 1]], source="view")


def split_rule(it: OpView) -> Rule:
    """split, chunk, tensor_split, in whatever words; the sizes are read off the outputs."""
    at = _split_dim(it.op, len(it.shape))
    source = numbered_dims(it.shape)
    lengths = [tensor.sizes[at] for tensor in it.makes]
    whole, parts, sizes = pieces_of(f"d{at}", lengths)
    if 0 in lengths:  # an output that holds nothing has no name to be cut by
        whole, parts, sizes = fixed(sum(lengths)), tuple(map(fixed, lengths)), {}
    outputs = [replaced(source, at, part) for part in parts]
    inputs = [replaced(source, at, whole), *fixed_dims(*it.reads[1:])]
    return it.rule(inputs, outputs, sizes=sizes, linear=[[0]], local=_local_split, source="view")


def _split_dim(op: Op, num_dims: int) -> int:
    at = {"hsplit": 1 if num_dims > 1 else 0, "vsplit": 0, "dsplit": 2}
    return at[op.kind] if op.kind in at else positive(arguments(op)["dim"], num_dims)


def _local_split(op: Op, cell: CellView) -> Call:
    at = _split_dim(op, len(cell.inputs[0]))
    return call("aten.split_with_sizes.default", Ref("0"), tuple(count(ranges[at]) for ranges in cell.outputs), at)


def cat_rule(it: OpView) -> Rule:
    """The joined dim is cut in the operands' common unit; each part joins its share of every operand."""
    target = numbered_dims(it.result)
    at = positive(it.args["dim"], len(target))
    # torch lets an empty list of one dim stand among operands of any rank
    fits = [len(shape) == len(target) for shape in it.shapes]
    lengths = [shape[at] if fit else 0 for shape, fit in zip(it.shapes, fits, strict=True)]
    whole, parts, sizes = pieces_of(f"d{at}", lengths)
    inputs = [replaced(target, at, part) if fit else (dim(0),) for fit, part in zip(fits, parts, strict=True)]
    return it.rule(inputs, [replaced(target, at, whole)], sizes=sizes, linear=[range(len(inputs))], source="view")


def stack_rule(it: OpView) -> Rule:
    """The new dim holds one index per operand; nobody may cut it."""
    at = positive(it.args["dim"], len(it.result))
    target = numbered_dims(it.result, whole=(at,))
    num_operands = len(it.reads)
    return it.rule([replaced(target, at)] * num_operands, [target], linear=[range(num_operands)], source="view")


_JOINED: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "hstack": {0: (0,)},
    "column_stack": {0: (0, 1), 1: (1,)},
    "dstack": {0: (0, 1, 2), 1: (0, 2), 2: (2,)},
    "vstack": {0: (0, 1), 1: (0,)},
    "row_stack": {0: (0, 1), 1: (0,)},
}
"""Where operands of so few dims are given more of them before they are joined."""


def stack_by_name_rule(it: OpView) -> Rule:
    """hstack, vstack, dstack, column_stack: a cat of operands that are given more dims."""
    target = numbered_dims(it.result)
    at = {"hstack": min(1, len(target) - 1), "column_stack": 1, "dstack": 2}.get(it.kind, 0)
    given = [_JOINED[it.kind].get(len(shape), ()) for shape in it.shapes]
    lengths = [
        1 if at in new else shape[at - sum(i < at for i in new)] for new, shape in zip(given, it.shapes, strict=True)
    ]
    whole, parts, sizes = pieces_of(f"d{at}", lengths)
    inputs = [
        tuple(one for i, one in enumerate(replaced(target, at, part)) if i not in new)
        for new, part in zip(given, parts, strict=True)
    ]
    return it.rule(inputs, [replaced(target, at, whole)], sizes=sizes, linear=[range(len(inputs))], source="view")


def repeat_rule(it: OpView) -> Rule:
    """repeat, tile: a dim of n repeated r times is `(r n)`, and either may be cut."""
    missing = len(it.result) - len(it.shape)
    sizes: dict[str, int] = {}
    source: list[Dim] = []
    target: list[Dim] = []
    for position, whole in enumerate(it.result):
        size = it.shape[position - missing] if position >= missing else 1
        inner = named(f"d{position}", size)
        times, outer = _times(whole, size), f"d{position}r"
        sizes.update(dict.fromkeys(inner.names, size) | ({outer: times} if times > 1 else {}))
        target.append(dim(*named(outer, times).products[0], *inner.products[0]))
        source.extend([inner] * (position >= missing))
    return it.rule([tuple(source)], [tuple(target)], sizes=sizes, linear=[[0]], local=_local_repeat, source="view")


def _times(whole: int, size: int) -> int:
    return whole // size if size else 1


def _local_repeat(op: Op, cell: CellView) -> Call:
    missing = len(cell.outputs[0]) - len(cell.inputs[0])
    times = []
    for position, whole in enumerate(cell.whole_outputs[0]):
        size = cell.whole_inputs[0][position - missing] if position >= missing else 1
        cut = cell.names.get(f"d{position}r")
        times.append(_times(whole, size) if cut is None else count(cut))
    return call("aten.repeat.default", Ref("0"), tuple(times))


def repeat_interleave_rule(it: OpView) -> Rule:
    """Each index of a dim repeated r times running is `(n r)`; without a dim all dims are merged first."""
    if it.op.target != "aten.repeat_interleave.self_int":
        return _uneven_repeat_rule(it)
    source = numbered_dims(it.shape)
    sizes = {name: size for one, size in zip(source, it.shape, strict=True) for name in one.names}
    times = int(it.args["repeats"])
    repeats: tuple[Factor, ...] = named("r", times).products[0]
    if it.args["dim"] is None:
        target: Dims = (dim(*(factor for one in source for factor in one.products[0]), *repeats),)
    else:
        at = positive(it.args["dim"], len(it.shape))
        target = replaced(source, at, dim(*source[at].products[0], *repeats))
    sizes["r"] = times
    return it.rule([source], [target], sizes=sizes, linear=[[0]], local=_local_repeat_interleave, source="view")


def _local_repeat_interleave(op: Op, cell: CellView) -> Call:
    values = arguments(op)
    times = count(cell.names["r"]) if "r" in cell.names else int(values["repeats"])
    return call("aten.repeat_interleave.self_int", Ref("0"), times, values["dim"])


def _uneven_repeat_rule(it: OpView) -> Rule:
    """Counts per index: the repeated dim may not be cut."""
    if it.op.target != "aten.repeat_interleave.self_Tensor" or it.args["dim"] is None:
        raise it.error(f"{it.op.target} without a dim has no rule", "name the dim")
    whole = (positive(it.args["dim"], len(it.shape)),)
    source, target = (numbered_dims(sizes, whole=whole) for sizes in (it.shape, it.result))
    return it.rule([source, *fixed_dims(it.reads[1])], [target], linear=[[0]], source="view")


def pad_rule(it: OpView) -> Rule:
    """Padded dims may not be cut, the others may. Linear unless the padding is a number other than 0."""
    amounts = integers(it.args.get("pad", it.args.get("padding")))
    padded = {len(it.result) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    source, target = (numbered_dims(sizes, whole=padded) for sizes in (it.shape, it.result))
    constant = it.args.get("mode", "constant") == "constant" and "value" in it.args
    linear = [[0]] if not constant or not it.args["value"] else []
    return it.rule([source], [target], linear=linear, source="view")


def shuffle_rule(it: OpView) -> Rule:
    """flip, roll, rot90: the dims whose order changes may not be cut."""
    listed = {"fliplr": (1,), "flipud": (0,)}.get(it.kind) or integers(it.args["dims"]) or range(len(it.shape))
    moved = [positive(i, len(it.shape)) for i in listed]
    source, target = (numbered_dims(sizes, whole=moved) for sizes in (it.shape, it.result))
    return it.rule([source], [target], linear=[[0]], source="view")


def meshgrid_rule(it: OpView) -> Rule:
    """Every operand is one dim of all outputs."""
    target = numbered_dims(it.result)
    order = list(range(len(target)))
    if it.args.get("indexing") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    inputs = [(target[order[i]],) if shape else () for i, shape in enumerate(it.shapes)]
    return it.rule(inputs, [target] * len(it.makes), linear=[range(len(inputs))], source="view")


def glu_rule(it: OpView) -> Rule:
    """Two halves of one dim: `(2 n) -> n`."""
    at = positive(it.args["dim"], len(it.result))
    target = numbered_dims(it.result)
    source = replaced(target, at, dim(2, *target[at].products[0]))
    return it.rule([source], [target], sizes=dict.fromkeys(target[at].names, it.result[at]))


def pixel_shuffle_rule(it: OpView) -> Rule:
    """`(c r r) h w -> c (h r) (w r)`, and back."""
    back = it.kind == "pixel_unshuffle"
    r = it.shape[-1] // it.result[-1] if back else it.result[-1] // it.shape[-1]
    sides = [f"d* (c {r} {r}) h w", f"d* c (h {r}) (w {r})"]
    source, target = reversed(sides) if back else sides
    return it.text(f"{source} -> {target}", linear=[[0]], source="view")


def channel_shuffle_rule(it: OpView) -> Rule:
    """Channels of each group dealt out in turn; `c` may be cut, `g` too."""
    # parts of `g` and `c` keep the order of the whole, so a part is shuffled like a whole of as many groups
    sizes = {"g": int(it.args["groups"])}
    return it.text("b (g c) s* -> b (c g) s*", sizes=sizes, linear=[[0]], local=local_groups, source="view")


_SPLITS = """
split split_copy split_with_sizes split_with_sizes_copy chunk tensor_split unsafe_split hsplit vsplit dsplit
unsafe_chunk unsafe_split_with_sizes
"""
_PADS = """
pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d
"""

RULES: Mapping[str, RuleOf] = {
    **rules_of(slice_rule, "slice slice_copy narrow narrow_copy"),
    **rules_of(select_rule, "select select_copy unbind unbind_copy"),
    **rules_of(scatter_piece_rule, "slice_scatter select_scatter"),
    **rules_of(split_rule, _SPLITS),
    **rules_of(cat_rule, "cat concat concatenate"),
    "aten.stack": stack_rule,
    **rules_of(stack_by_name_rule, "hstack vstack row_stack dstack column_stack"),
    **rules_of(repeat_rule, "repeat tile"),
    "aten.repeat_interleave": repeat_interleave_rule,
    **rules_of(pad_rule, _PADS),
    **rules_of(shuffle_rule, "flip fliplr flipud roll rot90"),
    "aten.meshgrid": meshgrid_rule,
    "aten.glu": glu_rule,
    **rules_of(pixel_shuffle_rule, "pixel_shuffle pixel_unshuffle"),
    **rules_of(channel_shuffle_rule, "channel_shuffle native_channel_shuffle"),
}
"""Rules by operator."""
