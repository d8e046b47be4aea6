"""Foresight: what a step of a plan takes on a cluster, found without running it.

In: a compiled program, its model, a cluster, and who says how long kernels take. Out: a Forecast: the Simulation of the
step, and whether each rank's memory suffices. What is played is what the program's own code does (`record.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.cost.cluster.cluster import Cluster
from weft.cost.compute.device import Device
from weft.cost.compute.kernel import Kernel
from weft.cost.compute.profiled import Profile
from weft.ir.graph import Graph
from weft.ops.book import RuleBook
from weft.ops.work import ATTENTION, contraction, work_of
from weft.simulate.engine import simulate
from weft.simulate.record import record
from weft.simulate.result import Rank, Simulation
from weft.simulate.timing import Clocks, kernels_of
from weft.simulate.trace import Job, Trace
from weft.train.memory.amounts import shown

RESERVED = 1 << 30
"""Bytes of an accelerator that its context, the kernels and communicators take; as public reports of CUDA and NCCL have
it, 0.6 to 1.2 GB."""


@dataclass(frozen=True)
class ClusterMachine:
    """The devices and links of a cluster, as the simulator asks for them."""

    cluster: Cluster
    clocks: Clocks

    def device(self, rank: int) -> Device:
        return self.cluster.device(rank)

    def seconds(self, rank: int, kernel: Kernel) -> float:
        return self.clocks.times[self.device(rank).name].seconds(kernel)

    def collective(self, kind: str, group: tuple[int, ...], bytes: int) -> float:
        return self.clocks.collective(self.cluster, kind, group, bytes)

    def message(self, source: int, target: int, bytes: int) -> float:
        return self.clocks.collective(self.cluster, "exchange", (source, target), bytes)

    def overhead(self, phase: str) -> float:
        return self.clocks.overheads.get(phase, 0.0)

    def occupies(self, rank: int) -> bool:
        return not self.device(rank).overlaps

    def link(self, group: tuple[int, ...]) -> str | None:
        return self.cluster.level(group).name


@dataclass(frozen=True)
class Forecast:
    """What a step of a plan takes.

    Args:
        plan: in words. over: bytes that the fullest rank holds beyond what its device has; 0 if it fits.
    """

    plan: str
    job: Job
    machine: ClusterMachine
    simulation: Simulation
    over: int

    @property
    def source(self) -> str:
        """Where times are from; of a profile, too, how many operators it lacks."""
        told, profile = self.machine.clocks.source, self.machine.clocks.times[self.machine.device(0).name]
        if not isinstance(profile, Profile):
            return told
        kernels = kernels_of(self.job.traces)
        hows = Counter(map(profile.how, kernels))
        if hows["measured"] == len(kernels):
            return told
        return (
            f"{told}; of {len(kernels)} distinct operators {hows['interpolated']} are interpolated between measured "
            f"sizes, and {hows['roofline']} estimated: --measure measures what can be measured"
        )

    @property
    def fullest(self) -> Rank:
        return max(self.simulation.ranks, key=lambda one: one.memory.peak - room(self.machine.device(one.rank)))

    def shortage(self) -> str:
        """Of a plan that does not fit: which rank, when, how many bytes, the three largest causes, what takes less."""
        rank, device = self.fullest, self.machine.device(self.fullest.rank)
        causes = [f"{kind}{f' of {line}' if line else ''} {shown(size)}" for kind, line, size in rank.memory.causes[:3]]
        return (
            f"does not fit: rank {rank.rank} holds {shown(rank.memory.peak)} after {rank.memory.when * 1000:.4g} ms of "
            f"the step, {shown(self.over)} more than {device.name} has ({shown(room(device))}); most of it are "
            f"{', '.join(causes)}; try: {remedy(rank)}"
        )


def job_of(compiled: Compiled, subject: Subject, cluster: Cluster) -> Job:
    """What all ranks do in a step."""
    traces = traces_of(compiled, subject, cluster)
    return Job(compiled.devices, traces, tokens_of(subject), flops_of(compiled.graph, compiled.plan.rules))


def traces_of(compiled: Compiled, subject: Subject, cluster: Cluster) -> Sequence[Trace]:
    """What the ranks do in a step, on the devices of a cluster."""
    cluster.refuse(compiled.devices)
    return record(compiled, subject, by_block=cluster.device(0).overlaps, kind=lambda rank: cluster.device(rank).name)


def foresee(compiled: Compiled, subject: Subject, cluster: Cluster, clocks: Clocks, *, name: str = "") -> Forecast:
    """Play a step of a program."""
    job = job_of(compiled, subject, cluster)
    machine = ClusterMachine(cluster, clocks)
    found = simulate(job, machine)
    over = max(one.memory.peak - room(cluster.device(one.rank)) for one in found.ranks)
    return Forecast(name or str(compiled.plan), job, machine, found, max(over, 0))


def room(device: Device) -> int:
    """Bytes of a device that a step may hold."""
    return device.memory - (RESERVED if device.overlaps else 0)


def remedy(rank: Rank) -> str:
    """What takes less memory, the cheapest first."""
    state = sum(size for kind, _, size in rank.memory.causes if kind in ("parameters", "optimizer", "gradients"))
    if 2 * state > rank.memory.peak:
        return "zero=1 (optimizer state in shards; no more communication), then zero=3, or tp, or pp over more devices"
    return "recompute, or more microbatches with pp, or coshard=2; a smaller batch"


def tokens_of(subject: Subject) -> int:
    """What a step works through: elements of the largest integer input, or the rows of the batch."""
    tensors = [one for one in pytree.tree_leaves(subject.example) if isinstance(one, Tensor) and one.dim()]
    ids = [one.numel() for one in tensors if one.dim() > 1 and one.dtype in (torch.int64, torch.int32)]
    return max(ids, default=tensors[0].shape[0] if tensors else 1)


def flops_of(graph: Graph, rules: RuleBook) -> int:
    """Of the model's products and attention, forward and backward, on one device, nothing twice: backward has two
    products for each of forward."""
    found = 0
    for op in graph.ops:
        rule = rules.rule(op)
        found += work_of(op, rule, graph).flops if op.kind == ATTENTION else contraction(op, rule, graph)
    return 3 * found
