"""Operators that take a tensor apart along a dim or put it together: slice, split, cat, repeat, pad, flip.

In: an op and its shapes. Out: its rule, names after the output's dims. Pieces of one dim have a common unit, the
greatest common divisor of their sizes: a fused projection of widths 4u, u, u is `[(n 4) | n | n]`, and each part of n
holds its share of every piece. So a split is as cuttable as the thing that was fused. Local calls state local sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ir.ranges import count
from weft.ops.arguments import arguments, call_with, integers, positive
from weft.ops.build import build, fixed, named, numbered_dims
from weft.ops.rule import Call, CellView, Dim, Dims, Factor, Rule, RuleOf, dim

_END = 2**62
"""Beyond any index: "to the end"."""


def replaced(dims: Sequence[Dim], at: int, one: Dim) -> Dims:
    """The same dims with one of them changed."""
    return (*dims[:at], one, *dims[at + 1 :])


def pieces_of(name: str, sizes: Sequence[int]) -> tuple[Dim, tuple[Dim, ...], int]:
    """A dim made of consecutive pieces: the whole, each piece, and the size of the common unit.

    >>> [str(one) for one in (pieces_of("n", (8, 2, 2))[0], *pieces_of("n", (8, 2, 2))[1])]
    ['[(n 4) | n | n]', '(n 4)', 'n', 'n']
    >>> str(pieces_of("n", (4, 4, 4))[0])
    '(3 n)'
    """
    unit = math.gcd(*sizes)
    if unit <= 1:
        return fixed(sum(sizes)), tuple(map(fixed, sizes)), 1
    parts = tuple(dim(0) if not size else dim(name) if size == unit else dim(name, size // unit) for size in sizes)
    held = [part for part, size in zip(parts, sizes, strict=True) if size]
    if len(set(held)) == 1:
        return dim(*((len(held),) if len(held) > 1 else ()), *held[0].products[0]), parts, unit
    return Dim(tuple(part.products[0] for part in held)), parts, unit


def slice_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """slice, narrow. The sliced dim may be cut in units common to what is taken and what is left."""
    at, start, step = _slice_arguments(op, reads[0].sizes, makes[0].sizes)
    size, taken = reads[0].sizes[at], makes[0].sizes[at]
    name = f"d{at}"
    target = numbered_dims(makes[0].sizes)
    if step == 1 and taken > 0:
        whole, parts, unit = pieces_of(name, (start, taken, size - start - taken))
        source, taken_dim = whole, parts[1]
    elif size == taken * step and taken > 1:  # every cell keeps one of each run of `step` indices
        source, taken_dim, unit = dim(name, step), dim(name), taken
    else:
        source, taken_dim, unit = fixed(size), fixed(taken), 1
    sizes = {name: unit} if unit > 1 else {}
    inputs = [replaced(target, at, source), *(tuple(map(fixed, tensor.sizes)) for tensor in reads[1:])]
    outputs = [replaced(target, at, taken_dim)]
    return build(inputs, outputs, reads, makes, sizes=sizes, linear=[[0]], local=_local_slice, source="view")


def _slice_arguments(op: Op, shape: Sequence[int], result: Sequence[int]) -> tuple[int, int, int]:
    """The dim, the first index and the step."""
    values = arguments(op)
    at = positive(values["dim"], len(shape))
    if isinstance(values["start"], Ref):
        raise RuleError(
            f"{op.target}: the first index is a tensor, so what is taken is not known before the run",
            place=op.place,
            remedy="keep the op copied: plan.trans(op, copy(...))",
        )
    start = int(values["start"] or 0)
    start = max(start + shape[at], 0) if start < 0 else min(start, shape[at])
    return at, start, int(values.get("step", 1))


def _local_slice(op: Op, cell: CellView) -> Call:
    at, start, step = _slice_arguments(op, cell.whole_inputs[0], cell.whole_outputs[0])
    taken = count(cell.outputs[0][at])
    if step > 1:
        # a slice may end before the dim does; then that dim is whole in every cell
        to_the_end = cell.whole_outputs[0][at] == -(-(cell.whole_inputs[0][at] - start) // step)
        end = _END if to_the_end else start + max(0, (taken - 1) * step + 1)
        return Call("aten.slice.Tensor", (Ref("0"), at, start, end, step))
    before = _share(start, taken, cell.whole_outputs[0][at])
    return Call("aten.slice.Tensor", (Ref("0"), at, before, before + taken, 1))


def _share(size: int, local: int, whole: int) -> int:
    """The part of `size` that belongs to `local` of `whole`: pieces of one dim are cut in the same proportion."""
    return size * local // whole if whole else size


def select_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """One index of a dim, which nobody may cut."""
    at = positive(arguments(op)["dim"], len(reads[0].sizes))
    target = numbered_dims(makes[0].sizes)
    source = (*target[:at], fixed(reads[0].sizes[at]), *target[at:])
    return build([source], [target], reads, makes, linear=[[0]], source="view")


def scatter_piece_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """slice_scatter, select_scatter: the written dim may not be cut."""
    values = arguments(op)
    at = positive(values["dim"], len(makes[0].sizes))
    target = replaced(numbered_dims(makes[0].sizes), at, fixed(makes[0].sizes[at]))
    missing = len(target) > len(reads[1].sizes)
    written = (*target[:at], *target[at + 1 :]) if missing else replaced(target, at, fixed(reads[1].sizes[at]))
    return build([target, written], [target], reads, makes, linear=[[0, 1]], source="view")


def split_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """split, chunk, tensor_split, in whatever words; the sizes are read off the outputs."""
    at = _split_dim(op, len(reads[0].sizes))
    source = numbered_dims(reads[0].sizes)
    lengths = [tensor.sizes[at] for tensor in makes]
    whole, parts, unit = pieces_of(f"d{at}", lengths)
    if 0 in lengths:  # an output that holds nothing has no name to be cut by
        whole, parts, unit = fixed(sum(lengths)), tuple(map(fixed, lengths)), 1
    sizes = {f"d{at}": unit} if unit > 1 else {}
    outputs = [replaced(source, at, part) for part in parts]
    inputs = [replaced(source, at, whole), *(tuple(map(fixed, tensor.sizes)) for tensor in reads[1:])]
    linear = [[0]]
    return build(inputs, outputs, reads, makes, sizes=sizes, linear=linear, local=_local_split, source="view")


def _split_dim(op: Op, num_dims: int) -> int:
    fixed_dims = {"hsplit": 1 if num_dims > 1 else 0, "vsplit": 0, "dsplit": 2}
    return fixed_dims[op.kind] if op.kind in fixed_dims else positive(arguments(op)["dim"], num_dims)


def _local_split(op: Op, cell: CellView) -> Call:
    at = _split_dim(op, len(cell.inputs[0]))
    local = tuple(count(ranges[at]) for ranges in cell.outputs)
    return Call("aten.split_with_sizes.default", (Ref("0"), local, at))


def unbind_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """One output for each index of a dim, which nobody may cut."""
    at = positive(arguments(op)["dim"], len(reads[0].sizes))
    target = numbered_dims(makes[0].sizes)
    source = (*target[:at], fixed(reads[0].sizes[at]), *target[at:])
    return build([source], [target] * len(makes), reads, makes, linear=[[0]], source="view")


def cat_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The joined dim is cut in the operands' common unit; each part joins its share of every operand."""
    target = numbered_dims(makes[0].sizes)
    at = positive(arguments(op)["dim"], len(target))
    # torch lets an empty list of one dim stand among operands of any rank
    lengths = [tensor.sizes[at] if len(tensor.sizes) == len(target) else 0 for tensor in reads]
    whole, parts, unit = pieces_of(f"d{at}", lengths)
    inputs = [
        replaced(target, at, part) if len(tensor.sizes) == len(target) else (dim(0),)
        for tensor, part in zip(reads, parts, strict=True)
    ]
    sizes = {f"d{at}": unit} if unit > 1 else {}
    linear = [range(len(reads))]
    return build(inputs, [replaced(target, at, whole)], reads, makes, sizes=sizes, linear=linear, source="view")


def stack_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The new dim holds one index per operand; nobody may cut it."""
    target = numbered_dims(makes[0].sizes)
    at = positive(arguments(op)["dim"], len(target))
    source = (*target[:at], *target[at + 1 :])
    outputs = [replaced(target, at, fixed(len(reads)))]
    return build([source] * len(reads), outputs, reads, makes, linear=[range(len(reads))], source="view")


def repeat_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """repeat, tile: a dim of n repeated r times is `(r n)`, and either may be cut."""
    shape, missing = reads[0].sizes, len(makes[0].sizes) - len(reads[0].sizes)
    sizes: dict[str, int] = {}
    source: list[Dim] = []
    target: list[Dim] = []
    for position, whole in enumerate(makes[0].sizes):
        size = shape[position - missing] if position >= missing else 1
        inner = named(f"d{position}", size)
        times, outer = _times(whole, size), f"d{position}r"
        sizes.update(dict.fromkeys(inner.names, size) | ({outer: times} if times > 1 else {}))
        target.append(dim(*((outer,) if times > 1 else (times,) if times == 0 else ()), *inner.products[0]))
        source.extend([inner] * (position >= missing))
    outputs = [tuple(target)]
    linear = [[0]]
    return build([tuple(source)], outputs, reads, makes, sizes=sizes, linear=linear, local=_local_repeat, source="view")


def _times(whole: int, size: int) -> int:
    return whole // size if size else 1


def _local_repeat(op: Op, cell: CellView) -> Call:
    missing = len(cell.outputs[0]) - len(cell.inputs[0])
    times = []
    for position, whole in enumerate(cell.whole_outputs[0]):
        size = cell.whole_inputs[0][position - missing] if position >= missing else 1
        cut = cell.names.get(f"d{position}r")
        times.append(_times(whole, size) if cut is None else count(cut))
    return Call("aten.repeat.default", (Ref("0"), tuple(times)))


def repeat_interleave_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Each index of a dim repeated r times running is `(n r)`; without a dim all dims are merged first."""
    if op.target != "aten.repeat_interleave.self_int":
        return _uneven_repeat_rule(op, reads, makes)
    values = arguments(op)
    shape = reads[0].sizes
    source = numbered_dims(shape)
    sizes = {name: size for one, size in zip(source, shape, strict=True) for name in one.names}
    times = int(values["repeats"])
    repeats: tuple[Factor, ...] = ("r",) if times > 1 else (0,) if times == 0 else ()
    if values["dim"] is None:
        target: Dims = (dim(*(factor for one in source for factor in one.products[0]), *repeats),)
    else:
        at = positive(values["dim"], len(shape))
        target = replaced(source, at, dim(*source[at].products[0], *repeats))
    sizes["r"] = times
    local = _local_repeat_interleave
    return build([source], [target], reads, makes, sizes=sizes, linear=[[0]], local=local, source="view")


def _local_repeat_interleave(op: Op, cell: CellView) -> Call:
    values = arguments(op)
    times = count(cell.names["r"]) if "r" in cell.names else int(values["repeats"])
    return Call("aten.repeat_interleave.self_int", (Ref("0"), times, values["dim"]))


def _uneven_repeat_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Counts per index: the repeated dim may not be cut."""
    values = arguments(op)
    if op.target != "aten.repeat_interleave.self_Tensor" or values["dim"] is None:
        raise RuleError(f"{op.target} without a dim has no rule", place=op.place, remedy="name the dim")
    at = positive(values["dim"], len(reads[0].sizes))
    target = numbered_dims(makes[0].sizes)
    sides = [replaced(target, at, fixed(tensor.sizes[at])) for tensor in (reads[0], makes[0])]
    counts = tuple(map(fixed, reads[1].sizes))
    return build([sides[0], counts], [sides[1]], reads, makes, linear=[[0]], source="view")


def pad_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Padded dims may not be cut, the others may. Linear unless the padding is a number other than 0."""
    values = arguments(op)
    amounts = integers(values.get("pad", values.get("padding")))
    num_dims = len(makes[0].sizes)
    padded = {num_dims - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    target = numbered_dims(makes[0].sizes)
    sides = [
        tuple(fixed(tensor.sizes[i]) if i in padded else target[i] for i in range(num_dims))
        for tensor in (reads[0], makes[0])
    ]
    constant = values.get("mode", "constant") == "constant" and "value" in values
    linear = [[0]] if not constant or not values["value"] else []
    return build(sides[:1], sides[1:], reads, makes, linear=linear, source="view")


def shuffle_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """flip, roll: the dims whose order changes may not be cut."""
    values = arguments(op)
    shape = reads[0].sizes
    fixed_dims = {"fliplr": (1,), "flipud": (0,)}
    listed = fixed_dims[op.kind] if op.kind in fixed_dims else integers(values["dims"])
    moved = {positive(i, len(shape)) for i in (listed or range(len(shape)))}
    source = tuple(fixed(size) if i in moved else named(f"d{i}", size) for i, size in enumerate(shape))
    target = tuple(fixed(size) if i in moved else source[i] for i, size in enumerate(makes[0].sizes))
    return build([source], [target], reads, makes, linear=[[0]], source="view")


def triangle_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """tril, triu: a part has a diagonal of its own."""
    dims = numbered_dims(makes[0].sizes)
    return build([dims], [dims], reads, makes, linear=[[0]], local=_local_triangle, source="view")


def _local_triangle(op: Op, cell: CellView) -> Call:
    rows, columns = cell.inputs[0][-2:]
    diagonal = int(arguments(op)["diagonal"])
    if len(rows) <= 1 and len(columns) <= 1:
        down, right = (ranges[0][0] if ranges else 0 for ranges in (rows, columns))
        return call_with(op, {"diagonal": diagonal + down - right})
    options = (("rows", rows), ("columns", columns), ("upper", op.kind == "triu"))
    return Call("weft.triangle", (Ref("0"), diagonal), options)


def meshgrid_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Every operand is one dim of all outputs."""
    target = numbered_dims(makes[0].sizes)
    order = list(range(len(target)))
    if arguments(op).get("indexing") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    inputs = [(target[order[i]],) if tensor.sizes else () for i, tensor in enumerate(reads)]
    return build(inputs, [target] * len(makes), reads, makes, linear=[range(len(reads))], source="view")


def glu_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Two halves of one dim: `(2 n) -> n`."""
    at = positive(arguments(op)["dim"], len(makes[0].sizes))
    target = numbered_dims(makes[0].sizes)
    source = replaced(target, at, dim(2, *target[at].products[0]))
    sizes = dict.fromkeys(target[at].names, makes[0].sizes[at])
    return build([source], [target], reads, makes, sizes=sizes)


def pixel_shuffle_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`(c r r) h w -> c (h r) (w r)`, and back."""
    back = op.kind == "pixel_unshuffle"
    small, large = (makes[0].sizes, reads[0].sizes) if back else (reads[0].sizes, makes[0].sizes)
    ratio = large[-1] // small[-1]
    lead = numbered_dims(small[:-3])
    sizes = {"c": large[-3], "h": small[-2], "w": small[-1]}
    c, h, w = (named(name, size).products[0] for name, size in sizes.items())
    run = (ratio,) if ratio != 1 else ()
    shuffled = (*lead, dim(*c, *run, *run), dim(*h), dim(*w))
    plain = (*lead, dim(*c), dim(*h, *run), dim(*w, *run))
    inputs, outputs = ([plain], [shuffled]) if back else ([shuffled], [plain])
    return build(inputs, outputs, reads, makes, sizes=sizes, linear=[[0]], source="view")


_SPLITS = "split split_copy split_with_sizes split_with_sizes_copy chunk tensor_split unsafe_split hsplit vsplit dsplit"
_PADS = "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d"
_MORE_PADS = "replication_pad1d replication_pad2d replication_pad3d"

PIECES: Mapping[str, RuleOf] = {
    **dict.fromkeys(("aten.slice", "aten.slice_copy", "aten.narrow", "aten.narrow_copy"), slice_rule),
    **dict.fromkeys(("aten.select", "aten.select_copy"), select_rule),
    **dict.fromkeys(("aten.slice_scatter", "aten.select_scatter"), scatter_piece_rule),
    **{f"aten.{name}": split_rule for name in (*_SPLITS.split(), "unsafe_chunk", "unsafe_split_with_sizes")},
    **dict.fromkeys(("aten.unbind", "aten.unbind_copy"), unbind_rule),
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.concatenate"), cat_rule),
    "aten.stack": stack_rule,
    **dict.fromkeys(("aten.repeat", "aten.tile"), repeat_rule),
    "aten.repeat_interleave": repeat_interleave_rule,
    **{f"aten.{name}": pad_rule for name in (*_PADS.split(), *_MORE_PADS.split())},
    **dict.fromkeys(("aten.flip", "aten.fliplr", "aten.flipud", "aten.roll"), shuffle_rule),
    **dict.fromkeys(("aten.tril", "aten.triu"), triangle_rule),
    "aten.meshgrid": meshgrid_rule,
    "aten.glu": glu_rule,
    **dict.fromkeys(("aten.pixel_shuffle", "aten.pixel_unshuffle"), pixel_shuffle_rule),
}
"""Computed rules, by family."""
