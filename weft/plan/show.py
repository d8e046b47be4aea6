"""Plans as text: one row per op that was told something, repeated layers folded by wildcard.

    layers.*.attn.q_proj/linear   cut n 2 (tp)   devices 0 1

In: what a plan's lines add up to. Out: text that is the same for equal plans.
"""

from __future__ import annotations

from weft.ir.graph import Graph
from weft.plan.lines import Decision, State
from weft.plan.select import fold


def plan_table(graph: Graph, devices: int, state: State) -> str:
    """The whole plan, readable."""
    axes = " ".join(f"{name}={size}" for name, size in state.axes.items())
    lines = [f"plan of {graph.name} for {devices} device{'s' if devices > 1 else ''}{': ' if axes else ''}{axes}"]
    lines += _aligned(_rows(graph, state))
    for tensor, store in state.stores.items():
        lines.append(f"  store {graph.parameter_tensors[tensor].names[0]}   {store}")
    lines += [f"  block {name}   {ops}" for name, ops in state.blocks.items()]
    lines += [f"  order {relation}" for relation in state.orders]
    told = sum(op.name in state.decisions for op in graph.ops)
    if told < len(graph.ops):
        lines.append(f"  {len(graph.ops) - told} of {len(graph.ops)} ops follow their neighbours")
    return "\n".join(lines)


def _rows(graph: Graph, state: State) -> list[tuple[str, str]]:
    """Address and decision; layers share a row if all of them were told the same."""
    groups: dict[str, dict[str, Decision]] = {}
    for op in graph.ops:
        groups.setdefault(fold(op.name), {})[op.name] = state.decisions.get(op.name, Decision())
    rows = []
    for folded, members in groups.items():
        texts = {name: str(decision) for name, decision in members.items()}
        if len(set(texts.values())) == 1:
            rows.append((folded, next(iter(texts.values()))))
        else:
            rows.extend(texts.items())
    return [(name, text) for name, text in rows if text]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}   {text}" for name, text in rows]
