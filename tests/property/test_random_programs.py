"""Random graphs under random plans: lowered, proven, run on emulated devices, equal to one device.

A plain seeded loop: a failure names its seed, with the plan lines that are needed to see it. What was covered is
printed (`pytest -s`) and must be broad.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.oracle.prove import follow
from tests.property.graphs import random_case
from tests.property.harness import differences, run_program, run_single
from tests.property.plans import random_plan
from tests.property.sketch import Case
from weft.errors import PlanError, RuleError
from weft.ir.oplayout import Carried, Cut
from weft.ir.program import Chunks, Compute, Program, Recompute, Reshard, Step, Sync, Use
from weft.lower import lower
from weft.lower.check import check
from weft.plan.lines import Line
from weft.plan.plan import Plan

QUICK, FULL = 500, 5000
SHARDS = 4
MOST_SKIPPED = 0.4


def fault(case: Case, plan: Plan, covered: Counter[str]) -> str | None:
    """What is wrong with the program of a plan; "" if nothing is; None if the plan is refused."""
    try:
        program = lower(plan, outputs="all")
    except PlanError as error:
        covered[f"refused: {error.message.partition(' ')[2][:24]}"] += 1
        return None
    except Exception:  # noqa: BLE001  any other error of lowering is what this test looks for
        return traceback.format_exc(limit=-6)
    try:
        if check(program, plan.rules) != follow(program, plan.rules):
            return f"the check counts otherwise than the oracle\n{plan}"
        expected = run_single(case.graph, case.state, case.inputs)
        wrong = differences(run_program(program, case.state, case.inputs, timeout=20), expected)
    except RuleError as error:
        # an operator that cannot run on an empty part says so when its call is written
        covered[f"refused: {error.message.partition(' ')[2][:24]}"] += 1
        return None
    except Exception:  # noqa: BLE001  whatever goes wrong is told with its seed
        return traceback.format_exc(limit=-6)
    cover(program, covered)
    return "" if not wrong else f"differs from one device: {wrong}"


def cover(program: Program, covered: Counter[str]) -> None:
    """Count what the program contains."""
    for step in steps(program.steps):
        match step:
            case Compute():
                covered[f"op {program.graph.by_name[step.op].kind}"] += 1
                for use in step.layout.uses:
                    covered[f"use {type(use).__name__.lower()}"] += 1
                    covered["use cut uneven"] += isinstance(use, Cut) and len(set(use.shares)) > 1
                    covered["use cut in groups"] += isinstance(use, Cut) and len(use.groups) > 1
                    covered["use carried with others"] += isinstance(use, Carried) and len(step.inputs) > 1
                covered["step co-shard"] += step.layout.grid.repeats
            case Reshard():
                covered["step reshard with gradient"] += step.backward is not None
                covered.update(f"move {move.kind}" for move in (*step.forward, *(step.backward or ())))
            case Use(_, moves):
                covered.update(f"move {move.kind}" for move in moves)
            case Sync(_, sources, paths):
                covered["step sync of several uses"] += len(sources) > 1
                covered.update(f"sync {move.kind}" for path in paths for move in path)
            case Chunks() | Recompute():
                covered[f"step {type(step).__name__.lower()}"] += 1
            case _:
                covered[f"step {type(step).__name__.lower()}"] += 1


def steps(all_steps: Sequence[Step]) -> Iterator[Step]:
    """Every step, also inside loops and regions."""
    for step in all_steps:
        yield step
        if isinstance(step, Chunks | Recompute):
            yield from steps(step.body)


def shrunk(case: Case, plan: Plan) -> Plan:
    """The plan without the lines that the fault does not need."""
    for at in reversed(range(len(plan.lines))):
        fewer = without(plan, at)
        if fewer is not None and fault(case, fewer, Counter()):
            plan = fewer
    return plan


def without(plan: Plan, at: int) -> Plan | None:
    """The plan without one line, if the others still make a plan."""
    kept: list[Line] = [line for i, line in enumerate(plan.lines) if i != at]
    fewer = Plan(plan.graph, plan.devices, tuple(kept), plan.rules)
    try:
        fewer.decisions  # noqa: B018  raises if the lines do not fit
    except PlanError:
        return None
    return fewer


def run_seeds(seeds: range) -> Counter[str]:
    """Try all seeds; fail at the first that is wrong."""
    covered: Counter[str] = Counter()
    for seed in seeds:
        case = random_case(seed)
        plan = random_plan(case.graph, seed * 7 + 1)
        found = fault(case, plan, covered)
        if found:
            less = shrunk(case, plan)
            lines = "\n".join(map(str, less.lines))
            again = fault(case, less, Counter())
            raise AssertionError(f"seed {seed} on {plan.devices} devices\n{case}\n{lines}\n{again or found}")
        covered["skipped" if found is None else "run"] += 1
    print("\n" + "  ".join(f"{name}: {number}" for name, number in sorted(covered.items())))
    assert covered["skipped"] <= MOST_SKIPPED * len(seeds)
    return covered


def test_parts_without_elements_are_gathered_again_too() -> None:
    # a group norm cut as [2, 0, 0, 2]: ranks that hold nothing take part in backward's gather of w3
    run_seeds(range(2081, 2082))


@pytest.mark.parametrize("shard", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, SHARDS))])
def test_random_programs(shard: int) -> None:
    size = QUICK // SHARDS
    covered = run_seeds(range(shard * size, (shard + 1) * size))
    wanted = ["move all_reduce", "move all_to_all", "move exchange", "move local", "step chunks", "step recompute"]
    wanted += ["step take", "step give", "use carried", "use cut uneven", "use cut in groups", "step co-shard"]
    wanted += ["step sync of several uses", "step reshard with gradient"]
    assert not [name for name in wanted if not covered[name]]
    assert sum(name.startswith("op ") for name in covered) >= 35


@pytest.mark.full
@pytest.mark.parametrize("shard", range(10))
def test_many_random_programs(shard: int) -> None:
    size = FULL // 10
    run_seeds(range(QUICK + shard * size, QUICK + (shard + 1) * size))
