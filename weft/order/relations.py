"""Relations between events of a pipeline: said for every micro-batch, meant for each.

In: a Pipeline and Relations (`before(f(a, m + 2), b(a, m))`). Out: pairs of events, one per micro-batch where both
exist; the relations of 1F1B and of three-pass recycling as the paper writes them. Promised: relations that contradict
each other or the data are refused, with a smallest set of relations that does, and the circle they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weft.errors import PlanError
from weft.ir.schedule import PHASES, Before, Event, Pipeline
from weft.order.joint import of_edges

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
        fault = pipeline.fault(event)
        if fault:
            raise PlanError(f"it speaks of {fault[0]}", place=str(relation), remedy=fault[1])


def check_relations(pipeline: Pipeline, relations: Sequence[Before]) -> None:
    """Refuse relations that no order of events can keep, whatever the devices, or that no device sees to."""
    expand(pipeline, relations)
    if not _circle(pipeline, relations):
        for relation in relations:
            _check_seen(pipeline, relation)
        return
    needed = smallest(relations, lambda some: bool(_circle(pipeline, some)))
    circle = _circle(pipeline, needed)
    round_trip = " before ".join(map(str, (*reversed(circle), circle[-1])))
    raise PlanError(
        f"these relations contradict {'each other' if len(needed) > 1 else 'the data'}:\n{listed(needed)}\n"
        f"  they ask for {round_trip}",
        remedy="leave one of them out",
    )


def smallest(relations: Sequence[Before], is_wrong: Callable[[Sequence[Before]], bool]) -> list[Before]:
    """As few of these relations as are still wrong together."""
    needed = list(relations)
    for relation in relations:
        fewer = [one for one in needed if one is not relation]
        if is_wrong(fewer):
            needed = fewer
    return needed


def listed(relations: Sequence[Before]) -> str:
    """One line each, for errors."""
    return "\n".join(f"  {relation}" for relation in relations)


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
    waits: dict[Event, list[Event]] = {}
    for segment in pipeline.segments:
        for phase in filter(segment.has, PHASES):
            for micro in range(pipeline.microbatches):
                event = Event(phase, segment.name, micro)
                waits[event] = list(pipeline.before(event))
    for first, second in expand(pipeline, relations):
        waits[second].append(first)
    return of_edges({event: tuple(found) for event, found in waits.items()}).cycle()
