"""The same program at other sizes: does one program for all sizes give the numbers of one device there too?

In: a program whose form has free sizes, the user's module and example. Out: for each of a few other
sizes that the program serves, how far it lies from the eager module on a batch of that size, made from the example by
repeating or leaving out what it holds. Sizes that the eager module itself refuses are passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from weft.capture.example import split_example
from weft.compile.model_file import Subject
from weft.compile.pieces import stretched
from weft.errors import WeftError
from weft.ir.graph import Graph
from weft.runtime.jobs.launch import Pool
from weft.runtime.program.batch import Form
from weft.runtime.program.files import Source, files_of
from weft.runtime.program.sizes import evaluate, refused
from weft.verify.compare import AtSizes, Result, compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

NUM_OTHERS = 2
SCALES = (0.5, 2.0, 0.75, 1.5, 1.25, 3.0)
"""Sizes to try, as multiples of the example's."""


def with_other_sizes(
    result: Result,
    program: Source,
    graph: Graph,
    subject: Subject,
    *,
    seed: int,
    pool: Pool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """A verdict over a program at other sizes as well; as it was if its sizes are fixed."""
    files = files_of(program)
    form, found = Form.from_json(files.about["batch"]), []
    for given in other_sizes(form):
        other = replace(subject, example=resized(subject.example, form, given))
        try:
            reference = run_reference(other, seed=seed, wide=True)
        except WeftError:
            continue  # a table of the model ends before
        say(f"training at {_words(given)}, with the same program")
        ours = run_generated(files, graph, other, seed=seed, wide=True, reference=reference, pool=pool)
        differences = compare(ours, reference)
        equal = max(one.value for one in differences) < result.tolerance and not ours.disagreements
        found.append(AtSizes(given, equal, differences))
        if len(found) == NUM_OTHERS:
            break
    largest = [result.largest_difference, *(one.value for at in found for one in at.differences)]
    return replace(
        result,
        equal=result.equal and all(one.equal for one in found),
        largest_difference=max(largest),
        sizes=tuple(found),
    )


def other_sizes(form: Form) -> Iterator[dict[str, int]]:
    """Sizes that the program serves, not the example's: where one grows another shrinks."""
    if not form.sizes:
        return
    seen = []
    for scales in itertools.chain(zip(SCALES, reversed(SCALES), strict=True), itertools.product(SCALES, SCALES)):
        given = {}
        for place, one in enumerate(form.sizes):
            far = round((scales[place % 2] - 1) * one.example / one.step)
            given[one.name] = one.example + one.step * (far or 1)
        if given not in seen and refused(form.sizes, form.guards, given) is None:
            seen.append(given)
            yield given


def resized(example: Any, form: Form, given: Mapping[str, int]) -> Any:
    """The example at other sizes: its elements repeated along a dim from the start, or left out from the end."""
    leaves, spec = pytree.tree_flatten(split_example(example))
    for at, _, shape, _ in form.tensors:
        for dim, size in enumerate(shape):
            if isinstance(size, str):
                leaves[at] = stretched(leaves[at], dim, evaluate(size, given))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return kwargs or args


def _words(given: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in given.items())
