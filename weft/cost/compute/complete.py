"""Completing a profile: what is missing for some kernels is measured on this machine, and kept.

In: a Profile, kernels. Out: why some could not be measured; the profile has the others, and autograd's overhead. What
was measured before is not measured again, and what is measured is kept as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields

from weft.cost.compute.kernel import Kernel
from weft.cost.compute.measuring import Done, measure
from weft.cost.compute.overhead import Overhead, measure_overhead
from weft.cost.compute.profiled import Profile

NAMES = [f"overhead {one.name}" for one in fields(Overhead)]


def complete(
    profile: Profile,
    kernels: Iterable[Kernel],
    *,
    device: str | None = None,
    done: Done = lambda count, total: None,
) -> Mapping[str, str]:
    """Measure the kernels that the profile lacks; those that cannot be, by key, and why.

    Args:
        device: on which; the profile's is taken for it. What this machine has if not given.
        done: is told how many of how many are measured.
    """
    missing = profile.missing(kernels)
    if overhead_of(profile) is None:
        found = measure_overhead(processes=profile.processes, threads=profile.threads, device=device)
        for name, value in zip(NAMES, astuple(found), strict=True):
            profile.set_number(name, value)
    if not missing:
        return {}
    return measure(
        missing,
        processes=profile.processes,
        threads=profile.threads,
        device=device,
        done=done,
        keep=lambda seconds: profile.add(missing, seconds),
    ).refused


def overhead_of(profile: Profile) -> Overhead | None:
    """What autograd takes on the host, if that was measured."""
    found = [value for value in map(profile.number, NAMES) if value is not None]
    return Overhead(*found) if len(found) == len(NAMES) else None
