"""The proof by types: it accepts what lowering makes, counts as the full prover does, and accepts nothing wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, MODELS, RECIPES
from tests.property.mutate import mutant
from tests.property.samples import samples
from weft.capture import capture
from weft.errors import CheckError
from weft.ir.graph import Graph
from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, even, split
from weft.ir.program import Move, Program
from weft.lower import lower
from weft.lower.check import Report, check
from weft.lower.held import Mover
from weft.lower.terms import Content, Term, full
from weft.lower.transfer import Transfers
from weft.lower.typed import prove_by_types
from weft.lower.typed_moves import MoveProofs, UndecidedError
from weft.ops.book import RuleBook
from weft.plan.load import load_plan
from weft.runtime.script import Piece, Transfer

MORE_RECIPES = ("dp=2,tp=2,coshard=2", "dp=2,recompute=*")
DECIDED = tuple(name for name in HAND_WRITTEN if name != "uneven")
"""Plans by hand without empty parts; those are left to the full prover."""


@pytest.fixture(scope="module")
def graph_of() -> Callable[[str], Graph]:
    known: dict[str, Graph] = {}

    def find(name: str) -> Graph:
        if name not in known:
            subject = MODELS[name]()
            known[name] = capture(subject.model.train(), subject.example)
        return known[name]

    return find


def expect_proven(program: Program) -> None:
    counts = prove_by_types(program, RuleBook(program.graph))
    assert counts is not None
    assert Report(**counts) == check(program, full=True)


QUICK = ("mlp", "gpt-tied", "llama")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE_RECIPES])
@pytest.mark.parametrize("name", NAMES)
def test_recipe(name: str, recipe: str, graph_of: Callable[[str], Graph]) -> None:
    expect_proven(lower(load_plan(recipe, graph_of(name))))


@pytest.mark.parametrize("plan", DECIDED)
@pytest.mark.parametrize("name", NAMES)
def test_plan_by_hand(name: str, plan: str, graph_of: Callable[[str], Graph]) -> None:
    expect_proven(lower(HAND_WRITTEN[plan](graph_of(name))))


def test_empty_parts_are_left_to_the_prover(graph_of: Callable[[str], Graph]) -> None:
    program = lower(HAND_WRITTEN["uneven"](graph_of("mlp")))
    assert prove_by_types(program, RuleBook(program.graph)) is None
    assert check(program) == check(program, full=True)


def expect_sound(seeds: range, num_random: int) -> None:
    """What types accept, the full prover accepts, with the same counts."""
    pool, accepted, refused = samples(num_random), 0, 0
    for seed in seeds:
        rng = random.Random(seed)
        sample = pool[rng.randrange(len(pool))]
        made = mutant(sample.program, rng)
        if made is None:
            continue
        counts = prove_by_types(made[1], sample.book)
        try:
            found = check(made[1], sample.book, full=True)
        except CheckError as error:
            assert counts is None, f"{made[0]} of {sample.name}, seed {seed}: {error.message}"
            refused += 1
            continue
        if counts is not None:
            assert Report(**counts) == found, f"{made[0]} of {sample.name}, seed {seed}"
            accepted += 1
    print(f"\naccepted {accepted}, refused {refused}")
    assert accepted
    assert refused


def test_mutants() -> None:
    expect_sound(range(300), 6)


@pytest.mark.full
def test_many_mutants() -> None:
    expect_sound(range(10**6, 10**6 + 20_000), 60)


# moves

GRID = Grid((Axis("a", 2), Axis("b", 3)), (3, 1, 0, 5, 2, 4))
OTHER = Grid((Axis("c", 6),), (0, 1, 2, 3, 4, 5))
TWICE = Grid((Axis("a", 2), Axis("b", 3)), (0, 1, 2, 0, 1, 2))


def layouts() -> list[Layout]:
    """Every role on each axis of three grids; one has repeated devices."""
    roles = (COPY, PARTIAL, split(0), split(1))
    found = [even((6, 8), grid, pair) for grid in (GRID, TWICE) for pair in itertools.product(roles, repeat=2)]
    return found + [even((6, 8), OTHER, (role,)) for role in roles]


def followed(move: Move) -> tuple[int, bool]:
    """Collectives by following contents, and whether what arrives lies as the target."""
    mover = Mover(6)
    contents = {
        (part.device, part.slot): full("t", part.ranges, "", (("share", _point(move.source, part.share)),))
        for part in move.source.parts()
    }
    made = mover.moved(dict(contents), (move,))
    shares: dict[object, set[Term]] = {}
    good = True
    for part in move.target.parts():
        held = made[part.device, part.slot]
        good &= isinstance(held, Content) and held.dims == part.ranges
        if isinstance(held, Content):
            shares.setdefault(part.share, set()).update(Term("", term.summed, ()) for term in held.terms)
    addends = [term for terms in shares.values() for term in terms]
    return mover.collectives, good and len(addends) == len(set(addends))


def _point(layout: Layout, share: tuple[int, ...]) -> tuple[tuple[int, int]]:
    flat = 0
    for axis, at in zip(layout.partial_axes, share, strict=True):
        flat = flat * layout.grid.sizes[axis] + at
    return ((flat, flat + 1),)


def test_moves_are_proven_with_the_collectives_of_all_slices() -> None:
    proofs = MoveProofs(6)
    for source, target in random.Random(0).sample(list(itertools.product(layouts(), repeat=2)), 400):
        move = Move("all_reduce" if source.is_partial else "exchange", source, target)
        collectives, good = followed(move)
        assert good, move
        assert proofs.of(move).collectives == collectives, move


def broken(change: Callable[[Transfer], Transfer], at: int) -> Callable[[Transfers, Move, int], Transfer | None]:
    """`Transfers.of` with a fault on one device."""
    original = Transfers.of

    def of(self: Transfers, move: Move, device: int) -> Transfer | None:
        found = original(self, move, device)
        return change(found) if found is not None and device == at else found

    return of


def _reindexed(piece: Piece) -> Piece:
    return replace(piece, index=((((1, 2), (0, 1))), *piece.index[1:]))


FAULTS: dict[str, Callable[[Transfer], Transfer]] = {
    "a piece less": lambda t: replace(t, receives=t.receives[1:]),
    "a piece not sent": lambda t: replace(t, sends=t.sends[1:]),
    "another group": lambda t: replace(t, group=t.group[:-1]),
    "another kind": lambda t: replace(t, kind="all_to_all"),
    "two pieces change places": lambda t: replace(
        t, receives=(replace(t.receives[0], index=t.receives[1].index), *t.receives[1:])
    ),
    "added or put": lambda t: replace(t, add=False, receives=tuple(map(_reindexed, t.receives))),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("roles", [(split(0), COPY), (PARTIAL, COPY), (split(0), split(1))])
def test_a_wrong_transfer_is_not_proven(fault: str, roles: tuple[Role, Role], monkeypatch: pytest.MonkeyPatch) -> None:
    line = Grid((Axis("a", 3),), (0, 1, 2))
    move = Move("exchange", even((6, 6), line, roles[:1]), even((6, 6), line, roles[1:]))
    MoveProofs(3).of(move)
    mine = Transfers().of(move, 0)
    assert mine is not None
    if mine == FAULTS[fault](mine):
        pytest.skip("no fault for this move")
    monkeypatch.setattr(Transfers, "of", broken(FAULTS[fault], 0))
    with pytest.raises(UndecidedError):
        MoveProofs(3).of(move)


def test_a_move_of_another_shape_is_not_proven() -> None:
    line = Grid((Axis("a", 2),), (0, 1))
    with pytest.raises(UndecidedError):
        MoveProofs(2).of(Move("exchange", even((4,), line, (COPY,)), even((6,), line, (COPY,))))
    with pytest.raises(UndecidedError):
        MoveProofs(1).of(Move("exchange", even((4,), line, (COPY,)), even((4,), line, (split(0),))))
