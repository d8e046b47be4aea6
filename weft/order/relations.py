"""Relations between events of a pipeline: said for every micro-batch, meant for each.

In: a Pipeline and Relations (`before(f(a, m + 2), b(a, m))`). Out: pairs of events, one per micro-batch where both
exist; the relations of 1F1B and of three-pass recycling as the paper writes them. Promised: relations that contradict
each other or the data are refused, with a smallest set of relations that does, and the circle they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from weft.errors import PlanError
from weft.ir.schedule import Before, Event, Micro, Pipeline
from weft.order.joint import of_edges
from weft.order.steps import passes

Pair = tuple[Event, Event]


def expand(pipeline: Pipeline, relations: Iterable[Before]) -> tuple[Pair, ...]:
    """Each relation for each micro-batch; where `m + k` lies outside the step nothing is said."""
    pairs: dict[Pair, None] = {}
    for relation in relations:
        verify_relation(pipeline, relation)
        pairs.update((pair, None) for pair in _pairs(relation, pipeline.microbatches))
    return tuple(pairs)


def verify_relation(pipeline: Pipeline, relation: Before) -> None:
    """A relation speaks of segments, phases and micro-batches that the pipeline has."""
    for event in (relation.first, relation.second):
        segment = pipeline.by_name.get(event.segment)
        if segment is None:
            names = ", ".join(pipeline.by_name)
            raise PlanError(f"no segment is called {event.segment!r}", place=str(relation), remedy=f"segments: {names}")
        if event.phase != "f" and not segment.trains:
            raise PlanError(
                f"{event}: {event.segment!r} has no gradient", place=str(relation), remedy="relate its forward only"
            )
        if event.phase == "w" and not segment.splits:
            raise PlanError(
                f"{event}: the backward of {event.segment!r} cannot be divided",
                place=str(relation),
                remedy="relate its backward",
            )
        if isinstance(event.micro, int) and event.micro >= pipeline.microbatches:
            raise PlanError(
                f"{event}: there are {pipeline.microbatches} micro-batches (0 to {pipeline.microbatches - 1})",
                place=str(relation),
                remedy="run more micro-batches, or leave the relation out",
            )


def check_relations(pipeline: Pipeline, relations: Sequence[Before]) -> None:
    """Refuse relations that no order of events can keep, whatever the devices, or that no device sees to."""
    expand(pipeline, relations)
    if not _circle(pipeline, relations):
        for relation in relations:
            _check_seen(pipeline, relation)
        return
    needed = list(relations)
    for relation in relations:
        fewer = [one for one in needed if one is not relation]
        if _circle(pipeline, fewer):
            needed = fewer
    said = "\n".join(f"  {relation}" for relation in needed)
    round_trip = " before ".join(map(str, reversed(_circle(pipeline, needed))))
    last = str(_circle(pipeline, needed)[-1])
    raise PlanError(
        f"these relations contradict {'each other' if len(needed) > 1 else 'the data'}:\n{said}\n"
        f"  they ask for {round_trip} before {last}",
        remedy="leave one of them out",
    )


def _check_seen(pipeline: Pipeline, relation: Before) -> None:
    """Devices order their own events and wait for data: nothing else keeps two events apart."""
    first, second = relation.first, relation.second
    places = [pipeline.by_name[event.segment].devices for event in (first, second)]
    if set(places[0]) & set(places[1]):
        return
    todo, seen = [second], set[Event]()
    while todo:
        for need in pipeline.before(todo.pop()):
            if need == first:
                return
            if need not in seen:
                seen.add(need)
                todo.append(need)
    raise PlanError(
        f"no device runs both {first} and {second}, and no data leads from one to the other: nothing would wait",
        place=str(relation),
        remedy="relate events of one device",
    )


def one_f_one_b_relations(pipeline: Pipeline) -> tuple[Before, ...]:
    """1F1B as relations: in order, `ahead` forwards before the first backward, then one of each in turn."""
    ahead = _hops(pipeline)
    m, found = Micro(), list[Before]()
    for segment in pipeline.segments:
        name = segment.name
        found.append(Before(Event("f", name, m), Event("f", name, m + 1)))
        if name in ahead:
            found += [
                Before(Event("b", name, m), Event("b", name, m + 1)),
                Before(Event("f", name, m + ahead[name]), Event("b", name, m)),
                Before(Event("b", name, m), Event("f", name, m + ahead[name] + 1)),
            ]
    return tuple(found)


def nf1b_relations(pipeline: Pipeline, *, distance: int = 1) -> tuple[Before, ...]:
    """nF1B as relations, per stage: f1(m + 2k) before f2(m + k) before f3(m) before b(m - hops), k the distance."""
    rounds, ahead = passes(pipeline), _hops(pipeline)
    m, found = Micro(), list[Before]()
    for device in pipeline.devices:
        stage = sorted(pipeline.on(device), key=lambda one: rounds[one.name])
        for first, second in pairwise(stage):
            gap = (rounds[second.name] - rounds[first.name]) * distance
            found.append(Before(Event("f", first.name, m + gap), Event("f", second.name, m)))
        last = stage[-1].name
        if last in ahead:
            found.append(Before(Event("f", last, m + ahead[last]), Event("b", last, m)))
    return tuple(dict.fromkeys(found))


def _hops(pipeline: Pipeline) -> dict[str, int]:
    """How many changes of devices lie between each segment that trains and the end."""
    found: dict[str, int] = {}
    for segment in reversed(pipeline.segments):
        if segment.trains:
            later = (
                found[reader] + (pipeline.by_name[reader].devices != segment.devices)
                for reader in pipeline.readers[segment.name]
                if reader in found
            )
            found[segment.name] = max(later, default=0)
    return found


def _pairs(relation: Before, microbatches: int) -> Iterator[Pair]:
    first, second = relation.first, relation.second
    if isinstance(first.micro, int) or isinstance(second.micro, int):
        yield first, second
        return
    for base in range(-max(first.micro.offset, second.micro.offset), microbatches):
        numbers = base + first.micro.offset, base + second.micro.offset
        if all(0 <= number < microbatches for number in numbers):
            yield Event(first.phase, first.segment, numbers[0]), Event(second.phase, second.segment, numbers[1])


def _circle(pipeline: Pipeline, relations: Sequence[Before]) -> tuple[Event, ...]:
    """Events that wait for each other in a circle because of data and relations."""
    phases = {"f": True, "b": False, "w": False}
    waits: dict[Event, list[Event]] = {}
    for segment in pipeline.segments:
        for phase, always in phases.items():
            if always or (segment.trains and (phase == "b" or segment.splits)):
                for micro in range(pipeline.microbatches):
                    event = Event(phase, segment.name, micro)
                    waits[event] = list(pipeline.before(event))
    for first, second in expand(pipeline, relations):
        waits[second].append(first)
    return of_edges({event: tuple(found) for event, found in waits.items()}).cycle()
