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
from weft.ops.arguments import call, integers, positive
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
    at, step = positive(it.args["dim"], len(it.shape)), int(it.args.get("step", 1))
    size, taken, name = it.shape[at], it.result[at], f"d{at}"
    start = int(it.args["start"] or 0)
    start = max(start + size, 0) if start < 0 else min(start, size)
    target = numbered_dims(it.result)
    source, taken_dim, sizes = fixed(size), fixed(taken), dict[str, int]()
    if step == 1 and taken > 0:
        source, (_, taken_dim, _), sizes = pieces_of(name, (start, taken, size - start - taken))
    elif size == taken * step and taken > 1:  # every cell keeps one of each run of `step` indices
        source, taken_dim, sizes = dim(name, step), dim(name), {name: taken}
    inputs = [replaced(target, at, source), *fixed_dims(*it.reads[1:])]
    outputs = [replaced(target, at, taken_dim)]

    def local(op: Op, cell: CellView) -> Call:
        here = count(cell.outputs[0][at])
        if step > 1:
            # a slice may end before the dim does; then that dim is whole in every cell
            end = _END if taken == -(-(size - start) // step) else start + max(0, (here - 1) * step + 1)
            return call("aten.slice.Tensor", Ref("0"), at, start, end, step)
        # pieces of one dim are cut in the same proportion
        before = start * here // taken if taken else start
        return call("aten.slice.Tensor", Ref("0"), at, before, before + here, 1)

    return it.rule(inputs, outputs, sizes=sizes, linear=[[0]], local=local, source="view")


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
    num_dims = len(it.shape)
    named_dim = {"hsplit": 1 if num_dims > 1 else 0, "vsplit": 0, "dsplit": 2}.get(it.kind)
    at = positive(it.args["dim"], num_dims) if named_dim is None else named_dim
    source = numbered_dims(it.shape)
    lengths = [tensor.sizes[at] for tensor in it.makes]
    whole, parts, sizes = pieces_of(f"d{at}", lengths)
    if 0 in lengths:  # an output that holds nothing has no name to be cut by
        whole, parts, sizes = fixed(sum(lengths)), tuple(map(fixed, lengths)), {}
    outputs = [replaced(source, at, part) for part in parts]
    inputs = [replaced(source, at, whole), *fixed_dims(*it.reads[1:])]

    def local(op: Op, cell: CellView) -> Call:
        return call("aten.split_with_sizes.default", Ref("0"), tuple(count(ranges[at]) for ranges in cell.outputs), at)

    return it.rule(inputs, outputs, sizes=sizes, linear=[[0]], local=local, source="view")


def cat_rule(it: OpView) -> Rule:
    """The joined dim is cut in the operands' common unit; each part joins its share of every operand."""
    at = positive(it.args["dim"], len(it.result))
    # torch lets an empty list of one dim stand among operands of any rank
    return _joined(it, at, [() if len(shape) == len(it.result) else None for shape in it.shapes])


def _joined(it: OpView, at: int, given: Sequence[tuple[int, ...] | None]) -> Rule:
    """Operands laid end to end along a dim, after each was `given` more dims; None for one that holds nothing."""
    target = numbered_dims(it.result)
    pairs = list(zip(given, it.shapes, strict=True))
    lengths = [0 if new is None else 1 if at in new else shape[at - sum(i < at for i in new)] for new, shape in pairs]
    whole, parts, sizes = pieces_of(f"d{at}", lengths)
    inputs = [
        (dim(0),) if new is None else tuple(one for i, one in enumerate(replaced(target, at, part)) if i not in new)
        for new, part in zip(given, parts, strict=True)
    ]
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
    at = {"hstack": min(1, len(it.result) - 1), "column_stack": 1, "dstack": 2}.get(it.kind, 0)
    return _joined(it, at, [_JOINED[it.kind].get(len(shape), ()) for shape in it.shapes])


def repeat_rule(it: OpView) -> Rule:
    """repeat, tile: a dim of n repeated r times is `(r n)`, and either may be cut."""
    missing = len(it.result) - len(it.shape)
    sizes: dict[str, int] = {}
    source: list[Dim] = []
    target: list[Dim] = []
    repeats: dict[str, int] = {}
    for position, whole in enumerate(it.result):
        size = it.shape[position - missing] if position >= missing else 1
        inner, outer = named(f"d{position}", size), f"d{position}r"
        times = repeats[outer] = whole // size if size else 1
        sizes.update(dict.fromkeys(inner.names, size) | ({outer: times} if times > 1 else {}))
        target.append(dim(*named(outer, times).products[0], *inner.products[0]))
        source.extend([inner] * (position >= missing))

    def local(op: Op, cell: CellView) -> Call:
        here = (count(cell.names[name]) if name in cell.names else times for name, times in repeats.items())
        return call("aten.repeat.default", Ref("0"), tuple(here))

    return it.rule([tuple(source)], [tuple(target)], sizes=sizes, linear=[[0]], local=local, source="view")


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

    def local(op: Op, cell: CellView) -> Call:
        here = count(cell.names["r"]) if "r" in cell.names else times
        return call("aten.repeat_interleave.self_int", Ref("0"), here, it.args["dim"])

    return it.rule([source], [target], sizes=sizes, linear=[[0]], local=local, source="view")


def _uneven_repeat_rule(it: OpView) -> Rule:
    """Counts per index: the repeated dim may not be cut."""
    if it.op.target != "aten.repeat_interleave.self_Tensor" or it.args["dim"] is None:
        raise it.error(f"{it.op.target} without a dim has no rule", "name the dim")
    return it.beside([positive(it.args["dim"], len(it.shape))], linear=[[0]], source="view")


def pad_rule(it: OpView) -> Rule:
    """Padded dims may not be cut, the others may. Linear unless the padding is a number other than 0."""
    amounts = integers(it.args.get("pad", it.args.get("padding")))
    padded = {len(it.result) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    constant = it.args.get("mode", "constant") == "constant" and "value" in it.args
    linear = [[0]] if not constant or not it.args["value"] else []
    return it.beside(padded, linear=linear, source="view")


def shuffle_rule(it: OpView) -> Rule:
    """flip, roll, rot90: the dims whose order changes may not be cut."""
    listed = {"fliplr": (1,), "flipud": (0,)}.get(it.kind) or integers(it.args["dims"]) or range(len(it.shape))
    return it.beside([positive(i, len(it.shape)) for i in listed], linear=[[0]], source="view")


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
