"""ParallelPipeline: what a user trains if the plan is in pieces: one rank's share, as a module with the original names.

In: the rank's pieces and events (`pipeline.py`), how batches go through them (`flow.py`), a seed. Out: an `nn.Module`
whose parameters and buffers are those of the rank's pieces, trained step by step:

    loss = parallel.train_step(batch, optimizer)

A step runs all micro-batches in the order of the schedule and leaves complete gradients, over replicas averaged; its
loss is that of the replica's batch, on every rank. A batch may have any number of rows: programs for micro-batches of
other sizes are made when they are first seen, on all ranks together; what the schedule has beyond the micro-batches
that there are is left out, and a replica that has no batch at all gives None. In training there is no forward by
itself: micro-batches go forward and backward in turn. `eval()` runs forwards alone, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

from weft.runtime.batch import BatchMismatch
from weft.runtime.flow import Flow, MakeFlow, MakeSize, lend, take_back
from weft.runtime.masters import Masters
from weft.runtime.microbatches import Arguments, TooFewRows
from weft.runtime.module import ParallelModule, Refusal
from weft.runtime.one_rank import OneRank
from weft.runtime.own import Loaded, LoadsByName
from weft.runtime.parallel import fits
from weft.runtime.pieces import Pieces
from weft.runtime.random import Stream
from weft.runtime.reduction import Reduction, reduced
from weft.runtime.training import arguments_of
from weft.runtime.unchanged import ASSIGN

NO_FORWARD = (
    "a model in pieces has no forward of its own in training: its micro-batches go forward and backward in turn",
    "loss = parallel.train_step(batch, optimizer), or parallel.forward_backward(batch); parallel.eval() to evaluate",
)
NO_GRADIENT = ("a training step under no_grad()", "parallel.eval(); parallel(batch) to evaluate")


class ParallelPipeline(LoadsByName, OneRank):
    """One rank of a parallel model in pieces.

    Args:
        make_flow: makes the programs of `eval()`; make_size: more sizes of micro-batches.
        masters: of the parameters of all pieces, if they compute in another precision.
        refusal: makes the error for a wrong call.
    """

    has_forward = False
    pieces: nn.ModuleList

    def __init__(
        self,
        flow: Flow,
        pieces: Pieces[ParallelModule],
        *,
        masters: Pieces[Masters] | None = None,
        seed: int,
        make_flow: MakeFlow,
        make_size: MakeSize,
        reduction: Reduction | None = None,
        refusal: Refusal,
    ) -> None:
        super().__init__(seed=seed, reduction=reduction or Reduction(), refusal=refusal)
        self._flow, self._pieces, self._make_flow, self._make_size = flow, pieces, make_flow, make_size
        self._masters = masters
        self._evaluations: list[Flow] = []
        self._losses: tuple[Tensor, ...] = ()
        # their names are told by the methods below
        self.__dict__["pieces"] = nn.ModuleList(
            pieces.modules if masters is None else [one.tree for one in masters.modules]
        )
        self.hold_apart("pieces", self.pieces)
        self._then: Callable[[], None] = lambda: None

    @property
    def program(self) -> Pieces[ParallelModule]:
        """The programs of the rank's pieces, as one."""
        return self._pieces

    @property
    def masters(self) -> Pieces[ParallelModule] | Pieces[Masters]:
        return self._pieces if self._masters is None else self._masters

    def trees(self) -> Iterable[nn.Module]:
        return self.pieces

    def when_complete(self, then: Callable[[], None]) -> None:
        self._then = then

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The loss of each micro-batch of the last step, before they were reduced."""
        return self._losses

    # Training.

    def cut(self, flow: Flow, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Arguments], int]:
        """The micro-batches of a batch, and its rows; refuses one of another form than the example's."""
        try:
            return flow.cut(args, kwargs)
        except (BatchMismatch, TooFewRows) as error:
            raise self._refused(str(error), "give batches in the form of the example") from None

    def looked_at(self, batch: Any) -> list[int]:
        """Sizes of micro-batches of a batch for training that no program is for yet; refuses what is no such batch."""
        if batch is None:
            return []
        micros, rows = self.cut(self._flow, *arguments_of(batch))
        self._weighed(micros, self._flow.parts(rows))
        return self._flow.missing([rows])

    def forward_backward(self, batch: Any, scale: float = 1.0) -> Tensor:
        """All micro-batches of a step; gradients, `scale` times, are added to what was there, the loss is returned.

        Args:
            batch: the replica's, the same on every rank of it; None if there is none for it in this step.
        """
        if not torch.is_grad_enabled():
            raise self._refused(*NO_GRADIENT)
        self.refuse_surroundings()
        flow = self._flow
        micros, rows = ([], 0) if batch is None else self.cut(flow, *arguments_of(batch))
        weights = self._weighed(micros, flow.parts(rows))
        told = self._totals(rows, sum(weights))
        inputs = self._begin(flow, "pipeline", micros, [int(one) for one, _ in told])
        counts = [one * scale for one in self.reduction.counts(weights, [weight for _, weight in told])]
        everybody = {size for one, _ in told for size in flow.size_of(int(one))}
        alike = len({one for one, _ in told}) == 1
        losses = self._accumulate(
            inputs, counts, size_of=flow.size_of(rows), completes=frozenset() if alike else everybody
        )
        self.step += 1
        self._weight, self._losses = sum(weights), tuple(losses)
        if not losses:
            return torch.zeros((), device=self._transport.device)
        return reduced(losses, self.reduction.shares(weights))

    def _begin(self, flow: Flow, kind: str, micros: Sequence[Arguments], rows: Sequence[int]) -> list[list[Tensor]]:
        """The inputs of micro-batches. Whatever is missing is made first: all ranks know what all replicas have."""
        for size in flow.missing(rows):
            self._make_size(flow, size)
        self.program.join_copies()
        flow.refresh()
        inputs = [flow.bind(*one) for one in micros]
        if self._transport.begin_program(self.step, f"{kind} {rows}"):
            self._refuse_other_batches([tensor for one in inputs for tensor in one])
        return inputs

    def _accumulate(
        self, inputs: Sequence[Sequence[Tensor]], counts: Sequence[float], **settings: Any
    ) -> Sequence[Tensor]:
        """Run a step's events; the gradients of the step are added to those that were there."""
        held = [parameter for module in self.program.modules for _, parameter in module.trained()]
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        losses: Sequence[Tensor] = ()
        if inputs or settings["completes"]:
            first = self.replica * self._flow.count
            losses = self._flow.rank.step(inputs, counts, self.seed, self.step, first=first, **settings)
        for copy in self.program.copies:
            if copy.alike:
                copy.other.grad = None  # the first copy has the sum of all
        for parameter, earlier in zip(held, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        for one in () if self._masters is None else self._masters.modules:
            one.collect()
        self._then()
        return losses

    # Evaluation.

    def train(self, mode: bool = True) -> ParallelPipeline:
        """As of any module; the first `eval()` makes the program for it, on all ranks together."""
        super().train(mode)
        if not mode and not self._evaluations:
            self._evaluations.append(self._make_flow(None))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In evaluation: what the original returns of the replica's batch, or its loss, on every rank; no gradient."""
        if self.training:
            raise self._refused(*NO_FORWARD)
        self.refuse_surroundings()
        flow = self.flow_for(args, kwargs)
        micros, rows = self.cut(flow, args, kwargs)
        told = self._totals(rows)
        number = self._evaluations.index(flow)
        inputs = self._begin(flow, f"evaluation {number}", micros, [int(one) for (one,) in told])
        for one in () if self._masters is None else self._masters.modules:
            one.refresh()
        lend(self.program, flow)
        stream = Stream(self.seed, self.step, self.replica * self._flow.count)
        found = flow.rank.forward(inputs, stream, size_of=flow.size_of(rows))
        take_back(self.program, flow)
        weights = self._weighed(micros, flow.parts(rows)) if flow.output is None else flow.parts(rows)
        self._weight = sum(weights)
        return flow.join(found, self.reduction.shares(weights))

    def flow_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow:
        """The program for a batch in evaluation; one is made if its arguments are others than any program's."""
        found = self.known_flow(args, kwargs)
        if found is None:
            found = self._make_flow((tuple(args), dict(kwargs)))
            self._evaluations.append(found)
        return found

    def known_flow(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow | None:
        """The program for a batch in evaluation, if there is one."""
        return next((flow for flow in self._evaluations if fits(flow.form, args, kwargs)), None)

    # What it holds, by the original names.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What the rank holds, once each; a copy in another layout stands under the same name again."""
        for name, held in (*self._named(prefix, twice=not remove_duplicate), *self._apart(prefix)):
            if isinstance(held, nn.Parameter):
                yield name, held

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, held in self._named(prefix, twice=not remove_duplicate):
            if not isinstance(held, nn.Parameter):
                yield name, held

    def _named(self, prefix: str, *, twice: bool) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        found = ((name, held) for name, held, _ in self.masters.held_by_name()) if twice else self.masters.held()
        return ((f"{start}{name}", held) for name, held in found)

    def _apart(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        return ((f"{start}{name}", held) for name, held in self.masters.apart())

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What this rank holds, under the original names."""
        found = {} if destination is None else destination
        for name, held, part in self.masters.held_by_name():
            if part.persistent:
                found[f"{prefix}{name}"] = held if keep_vars else held.detach()
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """What this rank holds, as `state_dict` gives it."""
        unexpected = [name for name in state_dict if name not in self.stored]
        missing = [name for name in self.state_dict() if name not in state_dict]
        if strict and (unexpected or missing):
            what = f"knows no {unexpected[0]}" if unexpected else f"is given no {missing[0]}"
            raise self._refused(
                f"rank {self._transport.rank} {what}", "load what state_dict() of the same plan gave on this rank"
            )
        if assign:
            raise self._refused(*ASSIGN)
        for module in self.masters.modules:
            mine = {name: value for name, value in state_dict.items() if name in module.stored}
            module.load_state_dict(mine, strict=False)
        return IncompatibleKeys(missing, unexpected)

    def load_given(self, given: Mapping[str, Any], *, strict: bool, assign: bool) -> Loaded:
        """Asked by torch for a module that holds this one, and says itself what is missing."""
        found = self.load_state_dict(given, strict=False, assign=assign)
        return Loaded(found.missing_keys, found.unexpected_keys, [])
