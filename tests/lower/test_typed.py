"""The proof by types: it accepts what lowering makes, counts as the oracle does, and accepts nothing wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, MODELS, RECIPES
from tests.oracle.held import Mover
from tests.oracle.prove import follow
from tests.oracle.terms import Content, Term, full
from tests.property.mutate import end_elsewhere, mutant
from tests.property.samples import piece_samples, samples
from weft.capture import capture
from weft.errors import CheckError
from weft.ir.graph import Graph
from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, copied_on, even, split
from weft.ir.program import Move, Program
from weft.lower import lower
from weft.lower.check import check
from weft.lower.pipeline import lower_pieces
from weft.lower.proof.moves import FaultError, MoveProofs
from weft.lower.transfer import Transfers
from weft.ops.book import RuleBook
from weft.plan.load import load_plan
from weft.runtime.layout.transfer import Piece, Transfer

MORE_RECIPES = ("dp=2,tp=2,coshard=2", "dp=2,recompute=*")
PIPELINES = ("pp=2", "pp=2,tp=2", "pp=2,dp=2,zero=3,microbatches=2")


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
    assert check(program) == follow(program)


QUICK = ("mlp", "gpt-tied", "llama")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE_RECIPES])
@pytest.mark.parametrize("name", NAMES)
def test_recipe(name: str, recipe: str, graph_of: Callable[[str], Graph]) -> None:
    expect_proven(lower(load_plan(recipe, graph_of(name))))


@pytest.mark.parametrize("plan", HAND_WRITTEN)
@pytest.mark.parametrize("name", NAMES)
def test_plan_by_hand(name: str, plan: str, graph_of: Callable[[str], Graph]) -> None:
    expect_proven(lower(HAND_WRITTEN[plan](graph_of(name))))


@pytest.mark.parametrize("recipe", PIPELINES)
@pytest.mark.parametrize("name", NAMES)
def test_pieces(name: str, recipe: str, graph_of: Callable[[str], Graph]) -> None:
    for part in lower_pieces(load_plan(recipe, graph_of(name))).parts:
        expect_proven(part.program)


@pytest.mark.parametrize("recipe", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_open_programs(recipe: str, graph_of: Callable[[str], Graph]) -> None:
    expect_proven(lower(load_plan(recipe, graph_of("mlp")), outputs="open"))


def expect_sound(mutants: Iterable[tuple[str, Program, RuleBook]]) -> None:
    """What types accept, the oracle accepts, with the same counts."""
    accepted, refused = 0, 0
    for told, program, book in mutants:
        try:
            proven = check(program, book)
        except CheckError:
            proven = None
        try:
            found = follow(program, book)
        except FaultError as fault:
            assert proven is None, f"{told}: {fault}"
            refused += 1
            continue
        if proven is not None:
            assert proven == found, told
            accepted += 1
    print(f"\naccepted {accepted}, refused {refused}")
    assert accepted
    assert refused


def mutants_of_wholes(seeds: range, num_random: int) -> Iterator[tuple[str, Program, RuleBook]]:
    pool = samples(num_random)
    for seed in seeds:
        rng = random.Random(seed)
        sample = pool[rng.randrange(len(pool))]
        made = mutant(sample.program, rng)
        if made is not None:
            yield f"{made[0]} of {sample.name}, seed {seed}", made[1], sample.book


def mutants_of_pieces(seeds: range, num_random: int) -> Iterator[tuple[str, Program, RuleBook]]:
    """A third of them at what the caller gives or gets."""
    pool = [(name, program, RuleBook(program.graph)) for name, program in piece_samples(num_random)]
    for name, program, book in pool:
        yield name, program, book
    for seed in seeds:
        rng = random.Random(seed)
        name, program, book = pool[rng.randrange(len(pool))]
        made = ("end", end_elsewhere(program, rng)) if rng.random() < 1 / 3 else mutant(program, rng)
        if made is not None and made[1] is not None:
            yield f"{made[0]} of {name}, seed {seed}", made[1], book


def test_mutants() -> None:
    expect_sound(mutants_of_wholes(range(300), 6))


def test_mutants_of_pieces() -> None:
    expect_sound(mutants_of_pieces(range(600), 20))


@pytest.mark.full
def test_many_mutants() -> None:
    expect_sound(mutants_of_wholes(range(10**6, 10**6 + 20_000), 60))


@pytest.mark.full
def test_many_mutants_of_pieces() -> None:
    expect_sound(mutants_of_pieces(range(10**6, 10**6 + 20_000), 120))


ENDS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "a root is missing": (lambda p: replace(p, roots=()), "backward must start once from each output"),
    "a root comes twice": (lambda p: replace(p, roots=p.roots * 2), "backward must start once from each output"),
    "a root is no output": (lambda p: replace(p, roots=tuple(p.entries.values())), "which the caller does not get"),
    "an entry is missing": (lambda p: replace(p, entries={}), "never goes back to the caller"),
    "an entry is elsewhere": (
        lambda p: replace(p, entries=dict.fromkeys(p.entries, p.roots[0])),
        "where it is not",
    ),
    "an output is given on otherwise": (
        lambda p: replace(p, given={name: copied_on(one.shape, (0,)) for name, one in p.given.items()}),
        "is needed",
    ),
}


@pytest.mark.parametrize("fault", ENDS)
def test_ends_of_a_piece(fault: str, graph_of: Callable[[str], Graph]) -> None:
    parts = lower_pieces(load_plan("pp=2,tp=2", graph_of("gpt-tied"))).parts
    program = next(part.program for part in parts if part.program.roots and part.program.entries)
    change, fact = ENDS[fault]
    with pytest.raises(CheckError, match=fact):
        check(change(program))


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
        assert proofs.of(move) == collectives, move


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
    with pytest.raises(FaultError):
        MoveProofs(3).of(move)


def test_a_move_of_another_shape_is_not_proven() -> None:
    line = Grid((Axis("a", 2),), (0, 1))
    with pytest.raises(FaultError):
        MoveProofs(2).of(Move("exchange", even((4,), line, (COPY,)), even((6,), line, (COPY,))))
    with pytest.raises(FaultError):
        MoveProofs(1).of(Move("exchange", even((4,), line, (COPY,)), even((4,), line, (split(0),))))
