"""Discovery: the rule of an operator that nobody has stated one for, found by running it.

In: an op without a rule, and its graph. Names are guessed from what the output shapes do (`guess.py`); each is then
tried: the op is run whole and cut (`trial.py`), at several sizes and with several kinds of values, in two and three
parts, even and uneven, forward and backward. Out: a Rule of source "discovered", or one of source "none" that freezes
every dim and says why. Promised: a cut that gave another result anywhere is not in the rule; what draws random numbers,
changes its operands or cannot be run is never cut. Found once for each form of an op in a process.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from weft.ir.graph import Graph, Op, Tensor
from weft.ir.oplayout import Carried, Cut, Use, cut_table, plain_cut
from weft.ops.arguments import overload, signature
from weft.ops.build import OpView
from weft.ops.guess import Guess, Shapes, guesses_at, names_of, rule_of
from weft.ops.rule import Rule, dim, floating
from weft.ops.specimen import (
    RECIPES,
    SMALL,
    Form,
    as_large_as_cheap,
    form_of,
    ignored,
    impurity,
    shrunk,
    specimens,
    with_recipe,
)
from weft.ops.trial import FAILURES, Specimen, first_line, try_cut, undisturbed

TOO_LARGE = 1 << 22
"""An op whose operands cannot be made smaller than so many numbers is not run."""


@dataclass(frozen=True)
class Question:
    """An op by its form: equal for ops that discovery cannot tell apart."""

    key: Hashable
    it: OpView = field(compare=False)


def discovered_rule(op: Op, graph: Graph) -> Rule:
    """The rule of an op, found by running it; one that freezes every dim, with the reason, if nothing can be cut."""
    return answer(question_of(op, graph))


def question_of(op: Op, graph: Graph) -> Question:
    """What discovery is asked about an op."""
    return Question((signature(op, graph), op.grad, op.draw is None), OpView.of(op, graph))


@lru_cache(maxsize=1024)
def answer(question: Question) -> Rule:
    """The rule of a form. Remembered, for many graphs hold the same layers."""
    op, reads, makes = question.it.op, question.it.reads, question.it.makes
    if op.draw is not None:
        return nothing(reads, makes, "it draws random numbers")
    if op.function is None and overload(op.target) is None:
        return nothing(reads, makes, "no operator of that name is known here")
    with warnings.catch_warnings(), undisturbed():
        warnings.simplefilter("ignore")
        return _Search(form_of(op, reads), reads, makes).rule()


def nothing(reads: Sequence[Tensor], makes: Sequence[Tensor], reason: str) -> Rule:
    """The rule of an operator of which nothing may be cut."""
    sizes: dict[str, int] = {}
    dims = []
    for side, tensors in (("in", reads), ("out", makes)):
        for position, tensor in enumerate(tensors):
            own = [f"{side}{position}_{d}" for d in range(len(tensor.sizes))]
            sizes.update(zip(own, tensor.sizes, strict=True))
            dims.append(tuple(map(dim, own)))
    return Rule(
        inputs=tuple(dims[: len(reads)]),
        outputs=tuple(dims[len(reads) :]),
        sizes=sizes,
        frozen=frozenset(sizes),
        source="none",
        reason=reason,
    )


def cuts_of(rule: Rule, names: Iterable[str] | None = None) -> Iterator[tuple[Cut, ...]]:
    """Ways to cut: every name in two and three parts, even and uneven, in groups, nested; every pair of names."""
    chosen = [n for n in (rule.cuttable if names is None else names) if rule.sizes[n] > 1]
    for name in chosen:
        size = rule.sizes[name]
        cuts = [plain_cut(name, size, shares) for shares in ((1, 1), (1, 2), (1, 1, 1), (1, 2, 1))]
        yield from ((one,) for one in cuts if all(cut_table([one])))
        if size % 4 == 0:
            yield (Cut(name, (1, 1), (size // 2, size // 2), size // 2),)
            yield (plain_cut(name, size, (1, 1)), plain_cut(name, size, (1, 1)))
    for a, b in itertools.combinations(chosen, 2):
        yield (
            plain_cut(a, rule.sizes[a], (1, 1)),
            plain_cut(b, rule.sizes[b], (1, 2) if rule.sizes[b] > 2 else (1, 1)),
        )


def few_cuts(rule: Rule) -> Iterator[tuple[Cut, ...]]:
    """Every name once, in uneven parts."""
    for name in rule.cuttable:
        size = rule.sizes[name]
        if size > 1:
            yield (plain_cut(name, size, (1, 2, 1) if size > 3 else (1, 1) if size == 2 else (1, 2)),)


class _Search:
    """The search for one op's rule."""

    def __init__(self, form: Form, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> None:
        self.real, self.reads, self.makes = form, reads, makes
        self.real_shapes: Shapes = tuple(one.sizes for one in makes)
        self.added: frozenset[int] = frozenset()

    def rule(self) -> Rule:
        self.large = as_large_as_cheap(self.real)
        self.base = shrunk(self.large, SMALL)
        if self.base.size > TOO_LARGE:
            return self._nothing(f"its operands cannot be made small enough to try it ({self.base.size} numbers)")
        try:
            self.base = with_recipe(self.base)
            reason = impurity(self.base)
        except FAILURES as error:
            return self._nothing(f"it cannot be run with operands made for a trial: {first_line(error)}")
        if reason:
            return self._nothing(reason)
        self.plain = RECIPES[self.base.recipe]
        self.specimens = list(specimens(self.base, RECIPES, 0))
        if not self.specimens:
            return self._nothing("it gives no numbers with operands made for a trial")
        if len(self.specimens[0].makes) != len(self.makes):
            return self._nothing("it makes another number of tensors than in the model")
        self.ignored = ignored(self.base)
        self.shapes: Shapes = self.specimens[0].shapes[1]
        guesses = self._confirmed(self._names())
        made = self._final(guesses)
        if not made.cuttable:
            return self._nothing("cut along any of its dims, it fails or gives other numbers")
        return made

    def _nothing(self, reason: str) -> Rule:
        return nothing(self.reads, self.makes, reason)

    def _rule(self, it: Specimen, guesses: Sequence[Guess], added: frozenset[int] = frozenset()) -> Rule | None:
        return rule_of(Form(it.op, it.reads), it.shapes[1], guesses, added)

    def _names(self) -> list[Guess]:
        """All names that pass the first trials, the simplest for each dim."""
        found: list[Guess] = []
        for where, _ in self.base.dims():
            for _round in range(2):  # a dim may hold two names
                guess = next(self._passing(guesses_at(self.base, self.shapes, where, found), found), None)
                if guess is None:
                    break
                found.append(guess)
        for guess in self._passing(guesses_at(self.base, self.shapes, None, found), found):
            found.append(guess)
        return found

    def _passing(self, guesses: Iterator[Guess], found: list[Guess]) -> Iterator[Guess]:
        for guess in guesses:
            if self._rule(self.specimens[0], [*found, guess]) is None:
                continue
            if guess.summed and self.ignored.issuperset(one.where[0] for one in guess.inputs):
                continue  # right, and of no use: nothing depends on what would be cut
            for added in self._added_sets(guess, found):
                if self._holds(guess, added):
                    self.added = added if guess.summed else self.added
                    yield guess
                    break

    def _added_sets(self, guess: Guess, found: Sequence[Guess]) -> Iterator[frozenset[int]]:
        """Which operands may be added to the result, along a name that is summed away."""
        if not guess.summed or any(one.summed for one in found):
            yield self.added if guess.summed else frozenset()
            return
        held = {one.where[0] for one in guess.inputs}
        free = [i for i, one in enumerate(self.base.reads) if i not in held and one.dtype.is_floating_point]
        for number in range(min(len(free), 3) + 1):
            yield from map(frozenset, itertools.combinations(free, number))

    def _holds(self, guess: Guess, added: frozenset[int]) -> bool:
        """True if the name can be cut, at its own size and at another."""
        first, *others = self.specimens
        rule = self._rule(first, [guess], added)
        if rule is None or guess.size < 2:
            return False
        if any(try_cut(first, rule, cut) for cut in cuts_of(rule)):
            return False
        if any(try_cut(it, rule, cut) for it in others for cut in few_cuts(rule)):
            return False
        for new in (guess.size + 1, guess.size * 2):
            for it in specimens(guess.grown(self.base, new), [self.plain], seed=7):
                other = self._rule(it, [guess], added)
                if other is None or any(try_cut(it, other, cut) for cut in few_cuts(other)):
                    return False
        return True

    def _confirmed(self, guesses: list[Guess]) -> list[Guess]:
        """The names that hold together, with other values, and at sizes close to the real ones."""
        first, *others = specimens(self.base, RECIPES, seed=11, gradients=True)
        large = list(specimens(replace(self.large, lower=self.base.lower), [self.plain], seed=13))
        guesses = self._holding(first, guesses, cuts_of)
        for it in (*others, *large):
            guesses = self._holding(it, guesses, few_cuts)
        return guesses if large else []

    def _holding(
        self, it: Specimen, guesses: list[Guess], cuts: Callable[[Rule], Iterable[tuple[Cut, ...]]]
    ) -> list[Guess]:
        """What is left when names are dropped until all cuts of all of them agree."""
        while guesses:
            rule = self._rule(it, guesses, self.added)
            if rule is None:
                guesses = guesses[:-1]
                continue
            bad = next((one for one in cuts(rule) if try_cut(it, rule, one)), None)
            if bad is None:
                return guesses
            names = names_of(guesses)
            last = max(names.index(one.name) for one in bad)
            guesses = [one for i, one in enumerate(guesses) if i != last]
        return guesses

    def _final(self, guesses: list[Guess]) -> Rule:
        """The rule of the op at its real sizes."""
        if not any(one.summed for one in guesses):
            self.added = frozenset()
        small = self._rule(self.specimens[0], guesses, self.added)
        linear = () if small is None else linear_sets_of(self.specimens, small, self.ignored)
        # kernels of torch crash on empty parts: they are not tried, and so not allowed
        never_empty = frozenset(names_of(guesses))
        while guesses:
            rule = rule_of(self.real, self.real_shapes, guesses, self.added, never_empty)
            if rule is not None:
                return replace(rule, linear=linear)
            guesses = guesses[:-1]
        return self._nothing("")


def linear_sets_of(
    specimens: Sequence[Specimen], rule: Rule, ignored: frozenset[int] = frozenset()
) -> tuple[frozenset[int], ...]:
    """The largest sets of operands in which an op is jointly linear, found by carrying addends through it."""
    first = specimens[0]
    if not all(map(floating, first.makes)):
        return ()
    free = [i for i, one in enumerate(first.reads) if floating(one) and i not in ignored]
    numbers = range(len(free), 0, -1) if len(free) <= 4 else (len(free), 1)
    cut = next(iter(cuts_of(rule, [name for name in rule.cuttable if name not in rule.algorithms])), ())
    # infinities are left out: times addends of both signs they make nothing of a sum that is one
    alike = [it for it in specimens if it.shapes == first.shapes and not any(bool(v.isinf().any()) for v in it.values)]
    found: list[frozenset[int]] = []
    for chosen in (frozenset(one) for number in numbers for one in itertools.combinations(free, number)):
        if not rule.added <= chosen or any(chosen <= one for one in found):
            continue
        asked = replace(rule, linear=(chosen,))
        uses: tuple[tuple[Use, ...], ...]
        uses = ((Carried(chosen),), (Carried(chosen), *cut), (Carried(chosen), Carried(chosen)))
        if all(not try_cut(it, asked, one) for it in alike for one in uses):
            found.append(chosen)
    return tuple(found)
