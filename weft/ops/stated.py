"""Stated rules: what a user says of an operator with `weft.register_op`, checked at its first use.

In: an op whose function or library operator has a Stated on it. The text is fitted to the op's shapes and tried as
`discover.py` tries its guesses: every name, in two and three parts, even and uneven, in pairs, forward and backward.
Out: a Rule of source "user". A rule that is wrong is refused with the counter-example, and with what was found instead.
What a name marked `!` exchanges is found by running it, and so are the operands in which the op is linear.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from weft.errors import RuleError
from weft.ir.graph import Graph, Op, Tensor, refs
from weft.ir.oplayout import Cut, plain_cut
from weft.ops.arguments import arguments, numbered, operand, overload
from weft.ops.build import groups, refuse_empty
from weft.ops.discover import Question, answer, cuts_of, few_cuts, linear_sets_of, question_of
from weft.ops.grammar import Template, instantiate, parse
from weft.ops.rule import Call, CellView, Local, Rule
from weft.ops.specimen import (
    EXTREME,
    RECIPES,
    SMALL,
    Form,
    as_large_as_cheap,
    form_of,
    impurity,
    shrunk,
    specimen,
    specimens,
    with_recipe,
)
from weft.ops.table import look_up
from weft.ops.trial import FAILURES, Specimen, Talk, first_line, try_cut, undisturbed
from weft.runtime.operators.algorithms import Exchange
from weft.runtime.operators.custom import CustomOp, Stated, stated_of

EXCHANGES = tuple(Exchange(output, gradient) for output in ("copy", "partial") for gradient in ("partial", "copy"))
"""What an algorithm may leave behind, the usual first."""


def stated(op: Op) -> Stated | None:
    """What the user has said of an op's function; None if nothing that tells how to cut it."""
    found = stated_of(overload(op.target) if op.function is None else getattr(op.function, "cls", op.function))
    return found if found is not None and found.rule else None


def stated_rule(op: Op, graph: Graph) -> Rule:
    """The rule that the user has stated for an op, checked."""
    found = stated(op)
    assert found is not None, f"nothing was stated of {op.target}"
    return checked_rule(op, graph, found)


def checked_rule(op: Op, graph: Graph, said: Stated) -> Rule:
    """The rule that a statement makes for an op, checked."""
    return _checked(question_of(op, graph), said)


@lru_cache(maxsize=1024)
def _checked(question: Question, said: Stated) -> Rule:
    with warnings.catch_warnings(), undisturbed():
        warnings.simplefilter("ignore")
        return _Check(question, said).rule()


@dataclass(frozen=True)
class _Fitted:
    """The stated rule at the sizes of a form."""

    template: Template
    said: Stated
    present: tuple[int | None, ...]
    exchanges: Mapping[str, Exchange]
    never_empty: frozenset[str] = frozenset()

    def rule(self, reads: Sequence[Tensor], makes: Sequence[Tensor]) -> Rule:
        made = instantiate(self.template, reads, makes, present=self.present, algorithms=self.exchanges)
        told = self.said.comm or self.said.indices or self.said.sizes or self.never_empty
        local = _local(self.said, self.never_empty, made.sizes) if told else None
        return replace(made, source="user", local=local)


class _Check:
    """The check of one stated rule for one form of its op."""

    def __init__(self, question: Question, said: Stated) -> None:
        self.question, self.said, self.it, self.op = question, said, question.it, question.it.op
        self.place = said.place or self.op.place

    def rule(self) -> Rule:
        fitted = self._fitted()
        real = fitted.rule(self.it.reads, self.it.makes)
        try:
            specimens = self._specimens(fitted)
        except RuleError:
            raise
        except FAILURES as error:
            reason = f"as stated, not checked: it cannot be run with operands made for a trial: {first_line(error)}"
            return replace(real, reason=reason)
        fitted = self._with_exchanges(fitted, specimens)
        self._refuse_wrong(fitted, specimens)
        fitted = replace(fitted, never_empty=self._never_empty(fitted, specimens))
        made = fitted.rule(self.it.reads, self.it.makes)
        small = fitted.rule(specimens[0].reads, specimens[0].makes)
        return replace(made, linear=linear_sets_of(specimens, small))

    def _fitted(self) -> _Fitted:
        """The text, read and laid against the operands of the op."""
        try:
            template = parse(self.said.rule)
        except RuleError as error:
            raise RuleError(error.message, place=self.place, remedy=error.remedy) from None
        asked, marked = set(self.said.comm), template.marked("algorithm")
        if asked != marked:
            odd = ", ".join(sorted(asked ^ marked))
            raise RuleError(
                f"the rule `{self.said.rule}` and comm={self.said.comm!r} do not agree about {odd}",
                place=self.place,
                remedy="mark the names of comm, and no others, with ! in the rule",
            )
        present = self._present(len(template.inputs))
        fitted = _Fitted(template, self.said, present, dict.fromkeys(sorted(marked), EXCHANGES[0]))
        try:
            rule = fitted.rule(self.it.reads, self.it.makes)
        except RuleError as error:
            raise RuleError(f"{self.op.kind}: {error.message}", place=self.place, remedy=error.remedy) from None
        if missing := [
            name for name in (*self.said.comm, *self.said.indices, *self.said.sizes) if name not in rule.sizes
        ]:
            raise RuleError(
                f"the rule `{self.said.rule}` has no name {missing[0]!r}",
                place=self.place,
                remedy="comm, indices and sizes take names of the rule",
            )
        return fitted

    def _present(self, num_operands: int) -> tuple[int | None, ...]:
        """For each operand of the text its position among the op's tensors; None where it was left out."""
        num_tensors = len(self.it.reads)
        if num_operands == num_tensors:
            return tuple(range(num_tensors))
        found = tuple(_possible(self.op))
        if len(found) != num_operands:
            raise RuleError(
                f"the rule `{self.said.rule}` has {num_operands} operands, {self.op.kind} is given {num_tensors} "
                "tensors",
                place=self.place,
                remedy="name every tensor argument, those that may be None too, in the order of the signature",
            )
        return found

    def _specimens(self, fitted: _Fitted) -> list[Specimen]:
        """The op with values, small and nearly as large as it is."""
        real = form_of(self.op, self.it.reads)
        large = as_large_as_cheap(real)
        found = [self._fitting(fitted, form) for form in (shrunk(large, SMALL), large)]
        first, *others = [form for form in found if form is not None] or [with_recipe(real)]
        if reason := impurity(first):
            raise RuleError(
                f"{self.op.kind} cannot be cut: {reason}",
                place=self.place,
                remedy="make it a function of its operands' values, and return new tensors",
            )
        # an algorithm computes in its own way, which extreme values tell from the operator's
        recipes = [one for one in RECIPES if self.said.run is None or one not in EXTREME]
        made = list(specimens(first, recipes, 3, gradients=self.said.run is None))
        for form in others:
            made += specimens(form, [RECIPES[first.recipe]], 3)
        if not made:
            raise ValueError("it gives no numbers")
        return made

    def _fitting(self, fitted: _Fitted, form: Form) -> Form | None:
        """The form with values that the op takes; None if it takes none, or the text does not fit."""
        try:
            form = with_recipe(form)
            it = specimen(form, RECIPES[form.recipe])
            fitted.rule(it.reads, it.makes)
        except FAILURES:
            return None
        return form

    def _with_exchanges(self, fitted: _Fitted, specimens: Sequence[Specimen]) -> _Fitted:
        """The first way to put results together that is right for all names that talk, and what they exchange."""
        if not fitted.exchanges:
            return fitted
        it = specimens[0]
        for chosen in itertools.product(EXCHANGES, repeat=len(fitted.exchanges)):
            asked = replace(fitted, exchanges=dict(zip(fitted.exchanges, chosen, strict=True)))
            rule, noted = asked.rule(it.reads, it.makes), {}
            for name in rule.algorithms:
                talk = Talk()
                if try_cut(it, rule, (plain_cut(name, rule.sizes[name], (1, 1)),), talk):
                    break
                forward, backward = tuple(talk.forward.get(name, ())), tuple(talk.backward.get(name, ()))
                noted[name] = replace(asked.exchanges[name], forward=forward, backward=backward)
            else:
                return replace(asked, exchanges=noted)
        return fitted

    def _refuse_wrong(self, fitted: _Fitted, specimens: Sequence[Specimen]) -> None:
        for number, it in enumerate(specimens):
            rule = fitted.rule(it.reads, it.makes)
            for uses in cuts_of(rule) if number == 0 else few_cuts(rule):
                if reason := try_cut(it, rule, uses):
                    raise self._wrong(it, uses, reason)

    def _wrong(self, it: Specimen, uses: Sequence[Cut], reason: str) -> RuleError:
        """The counter-example."""
        cuts = " and ".join(
            f"along {one.name!r} into {len(one.shares)} parts"
            + ("" if len(set(one.shares)) == 1 else f" ({':'.join(map(str, one.shares))})")
            for one in uses
        )
        shapes = ", ".join(str(one.sizes) for one in it.reads)
        table = look_up(self.it)
        other = table or answer(self.question)
        found = f"`{other}`" if other.cuttable else f"that nothing of it can be cut: {other.reason}"
        source = "running it showed" if table is None else "the table has"
        return RuleError(
            f"the rule `{self.said.rule}` of {self.op.kind} is wrong: cut {cuts}, with operands of shapes {shapes}, "
            f"{reason}",
            place=self.place,
            remedy=f"{source} {found}; state that, or leave the rule out",
        )

    def _never_empty(self, fitted: _Fitted, specimens: Sequence[Specimen]) -> frozenset[str]:
        rule = fitted.rule(specimens[0].reads, specimens[0].makes)
        if self.said.run is None:
            # kernels of torch crash on empty parts: they are not tried, and so not allowed
            return frozenset(rule.cuttable)
        cuts = {name: (plain_cut(name, rule.sizes[name], (0, 1)),) for name in rule.cuttable}
        return frozenset(name for name, cut in cuts.items() if try_cut(specimens[0], rule, cut))


def _possible(op: Op) -> Iterator[int | None]:
    """The arguments that are tensors, or None where a tensor could stand, in the order of the signature."""
    function = getattr(op.function, "cls", None)
    if isinstance(function, CustomOp):
        args, kwargs = op.function.spec.unflatten(numbered(op)[0])  # type: ignore[union-attr]
        bound = inspect.signature(function.function).bind(*args, **kwargs)
        bound.apply_defaults()
        values = list(bound.arguments.values())
    else:
        values = list(arguments(op).values())
    for value in values:
        inside = list(refs(value))
        if inside:
            yield from (operand(one) for one in inside)
        elif value is None:
            yield None


def user_target(function: Callable[..., Any]) -> str:
    """What a call of a user's function is called in a Program."""
    return f"user:{function.__module__}:{function.__qualname__}"


def _local(said: Stated, never_empty: frozenset[str], sizes: Mapping[str, int]) -> Local:
    """The call of a cell: the op's own, with the communicators and indices that the function asks for."""

    def local(op: Op, cell: CellView) -> Call:
        refuse_empty(op, cell, cell.cut & never_empty)
        args, kwargs = numbered(op)
        more = dict(kwargs)
        if comms := groups(cell, said.comm):
            more["comm"] = comms
        if any(name in cell.cut for name in said.indices):
            held = tuple(cell.names[name] for name in said.indices)
            more["indices"] = held[0] if len(held) == 1 else held
        if said.run is None or cell.cut.isdisjoint((*said.comm, *said.indices, *said.sizes)):
            return Call(op.target, args, tuple(more.items()))
        if said.sizes:
            whole = tuple(sizes[name] for name in said.sizes)
            more["sizes"] = whole[0] if len(whole) == 1 else whole
        return Call(user_target(said.run), args, tuple(more.items()), said.run)

    return local
