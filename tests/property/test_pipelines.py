"""Random graphs, random assignments of their ops to devices, random orders of events: equal to one device.

Ops live in stages on sets of devices of any size, convex or not, cut inside; or are placed one by one. The order of
events is any that keeps the data, as the devices see it. Pieces are generated, loaded and run on emulated devices. A
failure names its seed; what was covered is counted and must be broad. A random fault in an order is refused.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.oracle.prove import follow
from tests.order.cases import random_schedule
from tests.order.test_random import spoil
from tests.property.graphs import random_case
from tests.property.harness import Results, differences, run_single, take
from tests.property.plans import random_plan, staged_plan
from tests.property.sketch import Case
from weft.codegen.pipeline import generate_pipeline
from weft.errors import PlanError, RuleError
from weft.ir.schedule import Pipeline, Schedule
from weft.lower.check import check
from weft.lower.pipeline import Pipelined, lower_pieces
from weft.order import check_schedule
from weft.plan.plan import Plan
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.random import Stream
from weft.runtime.training.load import load_pipeline

QUICK, FULL, SHARDS = 40, 3000, 10
SEED, STEP = 7, 3


@dataclass(frozen=True)
class Job:
    """A case in pieces, with an order of its events."""

    case: Case
    plan: Plan
    pipelined: Pipelined
    pipeline: Pipeline
    schedule: Schedule
    files: Mapping[str, bytes]


def make_job(seed: int) -> Job | None:
    """None if the plan is refused."""
    draw = random.Random(seed)
    case = random_case(seed)
    plan = staged_plan(case.graph, draw) if draw.random() < 0.7 else random_plan(case.graph, seed * 7 + 1)
    try:
        pipelined = lower_pieces(plan)
    except (PlanError, RuleError):
        return None
    for part in pipelined.parts:
        assert check(part.program) == follow(part.program), f"seed {seed}, {part.piece.segment.name}: other counts"
    segments = tuple(part.piece.segment for part in pipelined.parts)
    pipeline = Pipeline(segments, draw.randint(1, 4))
    schedule = random_schedule(pipeline, draw)
    if any(buffer.update is not None for buffer in case.graph.buffers):
        # what a buffer becomes depends on the order of the forwards
        schedule = in_order(schedule)
    check_schedule(pipeline, schedule)
    try:
        files = generate_pipeline([pipelined], schedule)
    except RuleError:
        # a part that would hold nothing, of an op that cannot run on nothing
        return None
    return Job(case, plan, pipelined, pipeline, schedule, files)


def in_order(schedule: Schedule) -> Schedule:
    """Micro-batch after micro-batch."""
    return Schedule({device: tuple(sorted(row, key=lambda one: one.number)) for device, row in schedule.events.items()})


def batches_of(case: Case, count: int) -> list[dict[str, Tensor]]:
    """Inputs of each micro-batch: numbers differ."""
    return [
        {name: one * (1 + 0.1 * micro) if one.is_floating_point() else one for name, one in case.inputs.items()}
        for micro in range(count)
    ]


def expected_of(job: Job, batches: Sequence[Mapping[str, Tensor]]) -> Results:
    """One device, one micro-batch after the other."""
    state, losses, total = dict(job.case.state), [], {}
    for micro, batch in enumerate(batches):
        found = run_single(job.case.graph, state, batch, Stream(SEED, STEP, micro))
        losses.append(found.outputs[str(job.case.graph.loss)])
        for name, grad in found.grads.items():
            total[name] = total.get(name, 0) + grad / len(batches)
        state.update(found.updates)
    updates = {one.tensor: state[one.tensor] for one in job.case.graph.buffers if one.update is not None}
    return Results({"losses": torch.stack(losses)}, total, updates)


def run_job(job: Job, batches: Sequence[Mapping[str, Tensor]], directory: Path) -> list[Results]:
    """What every rank has, put together: a Results for each rank, of whole tensors."""
    graph, count = job.case.graph, len(batches)
    for name, content in job.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    names = {one.names[0]: one.tensor for one in (*graph.parameters, *graph.buffers)}
    changed = {one.tensor for one in graph.buffers if one.update is not None}

    def body(transport: Transport) -> Results:
        rank = load_pipeline(directory, Replica(transport, transport.num_ranks))
        grads: dict[str, Tensor] = {}
        updates: dict[str, Tensor] = {}
        with torch.no_grad():
            for module in rank.modules:
                for name, index in module.stored.items():
                    if module.part(name) is not None:
                        module.part(name).copy_(take(job.case.state[names[name]], index))
        inputs = [[batch[one.tensor].clone() for one in graph.inputs] for batch in batches]
        losses = rank.step(inputs, [1 / count] * count, SEED, STEP)
        for module in rank.modules:
            for name, parameter in module.trained():
                if parameter.grad is not None:
                    _place(grads, names[name], parameter.grad, module.stored[name], graph)
            for name in module.stored:
                if names[name] in changed:
                    _place(updates, names[name], module.part(name), module.stored[name], graph)
        return Results({"losses": torch.stack(losses).detach()}, grads, updates)

    return run_ranks(job.plan.devices, body, timeout=30)


def _place(into: dict[str, Tensor], name: str, part: Tensor, index: object, graph: object) -> None:
    whole = into.setdefault(name, torch.full(graph.tensors[name].sizes, torch.nan, dtype=part.dtype))
    at = tuple(torch.tensor([i for s, e in one for i in range(s, e)], dtype=torch.long) for one in index)
    grid = torch.meshgrid(*at, indexing="ij") if at else ...
    whole[grid] = part


def joined(ranks: Sequence[Results]) -> Results:
    """One Results of all ranks'; copies must agree bit for bit."""
    found = Results(dict(ranks[0].outputs), {}, {})
    for rank in ranks:
        assert torch.equal(rank.outputs["losses"], found.outputs["losses"]), "ranks tell different losses"
        for kind in ("grads", "updates"):
            for name, part in getattr(rank, kind).items():
                known = getattr(found, kind).setdefault(name, part.clone())
                if not part.is_floating_point():
                    continue
                both = ~known.isnan() & ~part.isnan()
                assert torch.equal(known[both], part[both]), f"copies of {name} differ"
                known[known.isnan()] = part[known.isnan()]
    return found


def fault(job: Job, directory: Path) -> str:
    """What is wrong; "" if nothing is."""
    batches = batches_of(job.case, job.pipeline.microbatches)
    try:
        wrong = differences(joined(run_job(job, batches, directory)), expected_of(job, batches))
    except Exception:  # noqa: BLE001  whatever goes wrong is told with its seed
        return traceback.format_exc(limit=-6)
    return f"differs from one device: {wrong}" if wrong else ""


def run_seeds(first: int, count: int, folder: Path) -> Counter[str]:
    """Run so many cases that are not refused; fail at the first that is wrong."""
    covered: Counter[str] = Counter()
    seed = first
    while covered["run"] < count:
        job = make_job(seed)
        if job is None:
            covered["refused"] += 1
        else:
            found = fault(job, folder / str(seed))
            lines = "\n".join(map(str, job.plan.lines))
            assert not found, f"seed {seed}\n{job.case}\n{lines}\n{job.schedule}\n{found}"
            covered["run"] += 1
            covered["several pieces"] += len(job.pipelined.parts) > 1
            covered["crossings"] += len(job.pipelined.crossings)
            covered["without gradient"] += sum(one.backward is None for one in job.pipelined.crossings)
            covered["ties"] += len(job.pipelined.ties)
            covered["weight gradients apart"] += any(event.phase == "w" for event in job.schedule.every())
        seed += 1
    print("\n" + "  ".join(f"{name}: {number}" for name, number in sorted(covered.items())))
    assert covered["refused"] <= covered["run"]
    return covered


def test_random_pipelines(tmp_path: Path) -> None:
    covered = run_seeds(0, QUICK, tmp_path)
    assert covered["several pieces"] > QUICK / 2 and covered["ties"] and covered["without gradient"]
    assert covered["weight gradients apart"]


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_random_pipelines(shard: int, tmp_path: Path) -> None:
    run_seeds(1000 * (shard + 1), FULL // SHARDS, tmp_path)


def refused(first: int, count: int) -> Counter[str]:
    """Faults in the orders of lowered pieces, all refused before anything runs."""
    kinds: Counter[str] = Counter()
    seed = first
    while kinds.total() < count:
        job, draw = make_job(seed), random.Random(seed)
        seed += 1
        spoilt = None if job is None else spoil(job.pipeline, job.schedule, draw)
        if job is None or spoilt is None:
            continue
        with pytest.raises(PlanError):
            check_schedule(job.pipeline, spoilt[1])
        kinds[spoilt[0]] += 1
    return kinds


def test_bad_orders_are_refused() -> None:
    assert len(refused(0, QUICK)) >= 4


@pytest.mark.full
def test_many_bad_orders_are_refused() -> None:
    refused(20_000, FULL // SHARDS)
