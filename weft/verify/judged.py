"""judge(): a program, whole or in pieces, against one device.

In: the files of the program, the Graph of the model as it is now, the user's module and example; the Programs that the
files were generated from, if they are known. Out: a Result. Both sides train on the same micro-batches, of which a
whole program has one: the reference runs them one after the other and counts their losses by rows, a program in pieces
runs them in the order of its schedule. If the sides differ, and the Programs are known, the first op that does is
looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces
from weft.ir.graph import Graph
from weft.runtime.jobs.launch import Pool
from weft.runtime.program.files import Source, files_of
from weft.verify.compare import Processes, Result, Sample, compare, count_silenced
from weft.verify.generated import evaluated_by, run_generated
from weft.verify.locate import locate, locate_in_code
from weft.verify.processes import compare_with_emulator, one_thread
from weft.verify.reference import run_reference
from weft.verify.rounded import judge_rounding
from weft.verify.sizes import with_other_sizes

Say = Callable[[str], None]


def judge(  # noqa: PLR0913 - each is a fact about the run
    program: Source,
    graph: Graph,
    subject: Subject,
    *,
    seed: int,
    tolerance: float,
    say: Say = lambda text: None,
    pool: Pool | None = None,
    pieces: InPieces | None = None,
    evaluation: Source | None = None,
) -> Result:
    """Run both sides and compare them, a program for several sizes at some of them; on the processes of `pool` if there
    is one.

    Args:
        program: its files, or the directory that holds them.
        pieces: what it was generated from.
        evaluation: the program for evaluation, which is compared too.
    """
    files = files_of(program)
    count, dims = len(files.about["size_of"]), files.about["dims"]
    say(f"training on one device, {f'{count} micro-batches a step, ' if count > 1 else ''}in float64")
    run = partial(run_generated, files, graph, subject, seed=seed)
    on_one = partial(run_reference, subject, seed=seed, microbatches=count, dims=dims)
    reference = on_one(wide=True, evaluation=None if evaluation is None else evaluated_by(evaluation))
    wide = partial(run, wide=True, reference=reference, evaluation=evaluation)
    say(f"training on {files.devices} emulated devices, in float64")
    processes = None
    if pool is None:
        ours = wide()
    else:
        ours, processes = run_both(wide, say=say, pool=pool)
    differences = compare(ours, reference)
    largest = max(found.value for found in differences)
    equal, first = largest < tolerance and not ours.disagreements, None
    if not equal and pieces is None:
        first = locate_in_code(graph, ours, reference, tolerance)
    elif not equal and pieces is not None:
        say("looking for the first difference")
        first = locate(pieces, graph, subject, ours, reference, seed=seed, tolerance=tolerance)
    say("training on both in the model's own precision")
    # a precision that was asked for is judged
    asked = subject.precision
    narrow, plain = run(wide=False, pool=None if asked is None else pool), on_one(wide=False, other=False)
    rounded = None if asked is None else judge_rounding(narrow, plain, reference, asked)
    result = Result(
        equal=equal and (rounded is None or not rounded.wrong),
        largest_difference=largest,
        differences=differences,
        tolerance=tolerance,
        devices=files.devices,
        first_difference=first,
        disagreements=ours.disagreements,
        rounding=compare(narrow, plain),
        silenced=count_silenced(ours, reference),
        processes=processes,
        rounded=rounded,
    )
    return with_other_sizes(result, files, graph, subject, seed=seed, pool=pool, say=say)


def run_both(run: Callable[..., Sample], *, say: Say, pool: Pool) -> tuple[Sample, Processes]:
    """Train through a program on processes, and how they compare with the emulator.

    Args:
        run: `run_generated` of the program.
    """
    with one_thread():
        emulated = run()
    say(f"training on {pool.num_ranks} processes ({pool.chosen[0].device.type}), in float64")
    ours = run(pool=pool)
    return ours, compare_with_emulator(ours, emulated, pool.chosen[0].backend)
