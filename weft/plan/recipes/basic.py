"""Recipes: functions that write a plan with the public primitives and nothing else.

    dp       cut the batch: the color of dim 0 of the inputs, on every op that has it; copy the others
    tp       cut heads, hidden dims, vocabulary: colors that divide many multiplications and move few bytes
    coshard  the colors of tp, all parts of a device on that device, one after the other and recomputed
    recompute   run modules again in backward

In: a Plan. Out: the Plan with more lines. They compose in this order; an op's axes then are (dp, tp, co). `megatron`,
`sp`, `zero` and `spread` have files of their own, and share what stands at the end here: one line per distinct cut, and
what is said when there is nothing to cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from weft.errors import PlanError
from weft.ir.layout import Grid
from weft.ops.rule import names_of
from weft.plan import primitives
from weft.plan.batch import BatchDims, told_batch, where_of
from weft.plan.colors import Color, Colors, OpName, find_colors
from weft.plan.follow import default_grid
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy, is_count
from weft.plan.recipes.blocked import largest_product, why_whole
from weft.plan.recipes.chains import Chain, choose_chains
from weft.plan.select import Selection, inside, is_path, module_of

SHOWN = 3
"""So many operators are named in an error."""


def dp(plan: Plan, parts: int, *, axis: str = "dp", batch_dims: BatchDims | None = None) -> Plan:
    """Cut the batch into so many parts.

    Args:
        plan: what was decided so far.
        parts: how many.
        axis: its name.
        batch_dims: for each tensor input its batch dim, in order or by place in the example; None for an input
            without one. If not given: dim 0 of every input of the same size as the first.
    """
    check_count("dp", parts)
    dims = told_batch(plan.graph, batch_dims)
    size = plan.graph.tensors[dims[0].tensor].sizes[dims[0].dim]
    if size < parts:
        raise PlanError(
            f"cannot cut a batch of {size} into {parts} parts",
            place=f"dim {dims[0].dim} of input {where_of(plan.graph, dims[0].tensor)}",
            remedy=(f"use dp={size} or less, or " if size > 1 else "leave out dp, or give ") + "a larger example batch",
        )
    colors = find_colors(plan.graph, plan.rules, parts, dims)
    batch = [color for color in dict.fromkeys(map(colors.at, dims)) if color is not None]
    chosen: dict[str, CutBy] = {}
    for color in batch:
        for op, member in color.members.items():
            chosen.setdefault(op, member.cut(parts, axis))
    if not chosen:
        chosen = {op: member.cut(parts, axis) for color in _begun(plan, colors) for op, member in color.members.items()}
    if not chosen:
        what = f"dim {dims[0].dim} of input {where_of(plan.graph, dims[0].tensor)}"
        reader = next((op for op in plan.graph.ops if dims[0].tensor in op.inputs), None)
        blocked = "" if reader is None else f": {reader.kind} cannot be cut along {what}"
        place = what if reader is None else reader.place
        remedy = (
            "write it with operators that keep rows apart, or, if another dim is the batch, name that of every input: "
            "dp(plan, parts, batch_dims=...) of weft.plan"
        )
        raise nothing_to_cut(plan, f"no op of {plan.graph.name} can be cut along the batch{blocked}", place, remedy)
    rest = [op.name for op in plan.graph.ops if op.name not in chosen]
    plan = cut_all(plan, chosen)
    return plan.trans(rest, primitives.copy(parts, axis)) if rest else plan


def _begun(plan: Plan, colors: Colors) -> Iterator[Color]:
    """Colors that begin as rows of what an op makes of an input that it sees whole, as bags do of ids and offsets."""
    given = {one.tensor for one in plan.graph.inputs}
    for op in plan.graph.ops:
        rule = plan.rule(op)
        if not given & set(op.inputs) or not rule.outputs or not rule.outputs[0]:
            continue
        read = {name for dims in rule.inputs for name in names_of(dims)}
        for name in rule.outputs[0][0].names:
            color = colors.at(OpName(op.name, name))
            if name not in read and color is not None:
                yield color


def tp(plan: Plan, parts: int, *, axis: str = "tp") -> Plan:
    """Cut what the inputs do not have: heads, hidden dims, vocabulary, whatever the model calls them.

    The colors are chosen by `choose_chains`: many multiplications divided, few bytes moved. Ops of no chosen color
    follow their neighbours; weights are cut where they have the color. For a transformer that is Megatron's plan; an
    embedding is cut along the vocabulary if it shares its weight with the head, otherwise there is no multiplication
    to divide and it is left whole.
    """
    check_count("tp", parts)
    chains = choose_chains(plan, parts)
    cuts = _cuts_of(plan, chains, parts, axis, f"{axis}={parts}")
    ends = dict.fromkeys(op for chain in chains for op in chain.ends if op not in cuts)
    plan = cut_all(plan, cuts)
    return plan.trans(list(ends), primitives.copy(parts, axis)) if ends else plan


def coshard(plan: Plan, parts: int, *, axis: str = "co") -> Plan:
    """Cut the chains of `tp` into parts that stay on their device, run one after the other and are recomputed.

    What a chain makes inside itself never exists whole: memory shrinks, nothing is sent. Chains through an operator
    whose parts must talk to each other are left out.
    """
    check_count("coshard", parts)
    chains = choose_chains(plan, parts, talking=False)
    cuts = _cuts_of(plan, chains, parts, axis, f"coshard={parts}")
    mesh = default_grid(plan)
    for one in mesh.axes:
        missing = [op for op in cuts if plan.decision(op).axis(one.name) is None]
        if missing:
            plan = plan.trans(missing, primitives.copy(one.size, one.name))
    plan = cut_all(plan, cuts)
    placed: dict[tuple[int, ...], list[str]] = {}
    for op in cuts:
        placed.setdefault(_repeated(plan, op, mesh), []).append(op)
    for devices, ops in placed.items():
        plan = plan.assign(ops, devices)
    for chain in chains:
        plan = _recompute_together(plan, plan.select(chain.members))
    return plan


def _cuts_of(plan: Plan, chains: Sequence[Chain], parts: int, axis: str, what: str) -> dict[str, CutBy]:
    """The cut of every op of the chains, which there must be."""
    if not chains:
        raise no_chain(plan, what, parts)
    return {op: cut for chain in chains for op, cut in chain.cuts(parts, axis).items()}


def _repeated(plan: Plan, op: str, mesh: Grid) -> tuple[int, ...]:
    """A device for every cell of the op: the one that its coordinates on the mesh name."""
    uses = plan.decision(op).uses
    places = [[one.axis for one in uses].index(axis.name) for axis in mesh.axes]
    cells = itertools.product(*(range(one.size) for one in uses))
    return tuple(mesh.device(tuple(cell[place] for place in places)) for cell in cells)


def recompute(plan: Plan, pattern: str = "full") -> Plan:
    """Run modules again in backward, each module that the pattern names as one; ops marked before are left as they are.

    Args:
        plan: what was decided so far.
        pattern: of module paths (`layers.*`, everything inside included), or any selection, recomputed as one;
            "full": every layer, that is every outermost numbered module (`blocks.0`, `blocks.1` ...); where none is
            numbered, every outermost module.
    """
    if pattern == "full":
        for layers in _layers(plan):
            plan = recompute(plan, layers)
        return plan
    if not is_path(pattern):
        return _recompute_together(plan, plan.select(pattern))
    modules = pattern.removesuffix(".**")
    chosen = plan.select(f"{modules}.**")
    # one call of a module is a run of ops; the next call of it comes after others
    for module, run in itertools.groupby(plan.graph.ops, lambda op: module_of(modules, op) if op in chosen else None):
        if module is not None:
            ops, whole = plan.select(run), inside(plan.graph, module)
            plan = _recompute_together(plan, whole if whole == ops else ops)
    return plan


def _layers(plan: Plan) -> list[str]:
    """Patterns of the outermost numbered modules."""
    found: dict[str, None] = {}
    for op in plan.graph.ops:
        words = op.path.split(".")
        number = next((at for at, word in enumerate(words) if word.isdigit()), None)
        if number is not None:
            found[".".join((*words[:number], "*"))] = None
    found = found or dict.fromkeys(_outermost([op.path for op in plan.graph.ops if op.path]))
    if not found:
        raise PlanError(
            f"{plan.graph.name} has no modules to recompute one by one",
            remedy='name ops: recompute=PATTERN, such as recompute="** op=gelu"',
        )
    return list(found)


def _outermost(paths: Sequence[str]) -> list[str]:
    """The outermost modules of which there are several; the innermost around all ops if there are none."""
    depth = 1
    while any(path.count(".") >= depth for path in paths) and len({_first(path, depth) for path in paths}) == 1:
        depth += 1
    return [_first(path, depth) for path in paths]


def _first(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _recompute_together(plan: Plan, ops: Selection) -> Plan:
    free = [op.name for op in ops if plan.decision(op).recompute is None and op.recompute is None]
    if not free:
        return plan
    return plan.trans(ops if len(free) == len(ops) else free, primitives.recompute())


# --- what recipes share -----------------------------------------------------------------------------------------


def cut_all(plan: Plan, cuts: Mapping[str, CutBy]) -> Plan:
    """One line per distinct cut."""
    lines: dict[CutBy, list[str]] = {}
    for op, cut in cuts.items():
        lines.setdefault(cut, []).append(op)
    for cut, ops in lines.items():
        plan = plan.trans(ops, cut)
    return plan


def check_count(what: str, parts: int) -> None:
    if not is_count(parts):
        raise PlanError(f"{what}={parts!r} is no number of parts", remedy="give a whole number of at least 1")


def no_chain(plan: Plan, what: str, parts: int) -> PlanError:
    message = (
        f"{what}: {plan.graph.name} has no inner dim (features, heads, channels, vocabulary) that a multiplication "
        f"uses and that falls into {parts} parts"
    )
    largest = largest_product(plan)
    if largest is None:
        message += ": none of its operators multiplies in a way that may be cut"
    else:
        message += f"; of its largest product, {largest.name}, {why_whole(plan, largest, parts)}"
    place = "" if largest is None else largest.place
    return nothing_to_cut(plan, message, place, "use fewer parts, or cut ops by hand with plan.trans")


def nothing_to_cut(plan: Plan, message: str, place: str, remedy: str) -> PlanError:
    """A recipe found nothing to cut: because some operators have no rule, or for another reason."""
    unruled = {op.kind: op for op in reversed(plan.rules.unruled())}
    if not unruled:
        return PlanError(message, place=place, remedy=remedy)
    kinds = sorted(unruled, key=lambda kind: plan.graph.ops.index(unruled[kind]))
    missing = f"{', '.join(kinds[:SHOWN])}{' ...' if len(kinds) > SHOWN else ''}"
    verb = "has" if len(kinds) == 1 else "have"
    return PlanError(
        f"{message}: {missing} {verb} no rule, so every device computes the whole of it",
        place=unruled[kinds[0]].place,
        remedy="write it with plain operators (linear, sigmoid, tanh ...), or cut other ops by hand with plan.trans",
    )
