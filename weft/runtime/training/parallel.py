"""Parallel: what a user trains: one rank's share of a model, as a module with the original names.

In: the rank's pieces, how batches go through them (`flow.py`), a seed. Out: an `nn.Module` that shows the parameters
and buffers of the rank's pieces under the original names (`parameters()` is what the optimizer updates on this rank):

    loss = parallel(*batch); loss.backward()           gradients complete, over replicas averaged
    loss = parallel.train_step(batch, optimizer)

A program of one piece is called with batches as the original is, and returns what the original does, full on every
rank: backward starts from what the caller makes of it; the gradients of outputs, and of inputs that require one, are
the same on every rank. Where that is more than a loss, a step (`train_step`) runs a program for the loss alone, and one
that returns all is made when the module is first called, on the same parameters.

A program of several pieces, or micro-batches, has no forward of its own in training: `train_step` runs all of them
in the order of the schedule. A batch may have any number of rows: programs for micro-batches of other sizes are made
when they are first seen, on all ranks together; what the schedule has beyond the micro-batches that there are is left
out, and a replica that has no batch at all gives None.

A step in training draws the random numbers of its own number (counted from 0: `parallel.step`) and replica; a call in
evaluation those of its number among the evaluations since then, whichever program it runs. `eval()` runs a program of
its own, made when it is first asked for, on the same weights; so does, in evaluation, a batch of other arguments than
the example's (one without labels).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.checks.shard_tensor import plainly
from weft.runtime.checks.unchanged import ASSIGN
from weft.runtime.checks.wrapping import REDRAWN, on_all_ranks, redraws
from weft.runtime.links.transport import Doing
from weft.runtime.program.batch import BatchMismatch
from weft.runtime.program.calling import Arguments, Signed
from weft.runtime.program.shown.tree import WHOLE
from weft.runtime.program.stored import shapes_of
from weft.runtime.program.surface import Modes
from weft.runtime.random import Stream
from weft.runtime.training.flow import Flow, lend, take_back
from weft.runtime.training.full_state import full_state
from weft.runtime.training.microbatches import TooFewRows
from weft.runtime.training.one_rank import OneRank
from weft.runtime.training.pipeline import Rank
from weft.runtime.training.reduction import reduced, times
from weft.runtime.training.shard_owners import tell_all
from weft.runtime.training.step import FORM, arguments_of, loss_of

NO_FORWARD = (
    "a model in pieces has no forward of its own in training: its micro-batches go forward and backward in turn",
    "loss = parallel.train_step(batch, optimizer), or parallel.forward_backward(batch); parallel.eval() to evaluate",
)
NO_GRADIENT = ("a training step under no_grad()", "parallel.eval(); parallel(batch) to evaluate")
LEFT = (
    "a step of the pipeline was left by an error in the middle: what its ranks had sent each other would be taken for "
    "that of the next one",
    "end the job, and go on from the last weft.save(); what may raise is best done before train_step(), or in prepare=",
)
NO_BATCH = (
    "a replica has no batch in this step (None), and the plan runs no micro-batches, of which one may have none",
    "give every replica as many batches: DistributedSampler, or drop_last=True",
)


class Parallel(OneRank):
    """One rank of a parallel model, as it is called."""

    _unused: Collection[str] | None = None
    """Trained parameters of a pipeline that no gradient comes to, on whatever rank."""
    evaluated = (0, 0)
    """The step at which evaluation was last called, and how often it was at this step."""

    @property
    def returns_loss(self) -> bool:
        """In training; otherwise it returns what the original does."""
        return self._flow.output is None

    @property
    def pipeline(self) -> Rank:
        """The pieces and events of training."""
        return self._flow.rank

    # A forward, or an evaluation.

    @Signed
    @on_all_ranks
    @plainly
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns of the replica's batch, on every rank of it."""
        calling = self.calling
        if calling is not None and (tuple(kwargs) != calling.keywords or len(args) != calling.num_args):
            args, kwargs = self.arranged(args, kwargs)
        if self.training and not self._flow.is_whole:
            raise self._refused(*NO_FORWARD)
        try:
            flow = self.flow_for(args, kwargs)
            if flow.is_whole:
                return self._run(flow, args, kwargs)
        except BatchMismatch as error:
            raise self._refused(str(error), FORM) from None
        return self._evaluate(flow, args, kwargs)

    def _run(self, flow: Flow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A program of one piece, on all of the batch."""
        inputs = flow.bind_whole(args, kwargs)
        looks, program = self._looks.get(flow), flow.program
        if redraws(program):
            raise self._refused(*REDRAWN)
        state = looks.state if looks is not None and looks.is_same() else self.refuse_surroundings(flow)
        if program.inner is not None:
            program.inner.state = state
        if (state is None or state is not program.live.state) and self._unchanged is not None:
            program.live.look(self._unchanged.trained, state)
        # a module may be trained in evaluation mode
        counts = self.training or (flow is self._flow and self.modes == self._surface.modes)
        program.stream = Stream(self.seed, self.step, self.replica, 0 if counts else self._next_evaluation())
        # evaluation may be the very program of training: its batches are others all the same
        number = "" if flow is self._flow else f" {self._number(flow)}"
        kind = f"{'training' if self.training else 'evaluation'}{number}"
        shapes = [tuple(tensor.shape) for tensor in inputs]
        self._is_checked = self._transport.begin_program(self.step, f"{kind} {shapes}")
        if self._is_checked:
            self._refuse_other_batches(inputs)
        trains = self.training or flow is self._flow
        if trains:
            self.begin_training(inputs, compare=self._is_checked)
            self.step += counts
        else:
            self.begin_evaluation()
        if flow.has_loss and (self.loss_alone or not trains):
            self._weigh(args, kwargs, inputs)
        found = program(*inputs)
        # what follows is the caller's
        self._transport.doing = Doing()
        if flow is not self._flow:
            # buffers that a forward of evaluation has changed
            take_back(self.program, flow)
        return found if flow.output is None else flow.output.build(found)

    def _evaluate(self, flow: Flow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forwards of all micro-batches; no gradient."""
        self.refuse_surroundings(flow)
        micros, rows = self.cut(flow, args, kwargs)
        told = self._totals(rows)
        inputs = self._begin(flow, f"program {self._number(flow)}", micros, [int(one) for (one,) in told])
        self.begin_evaluation()
        for one in () if self._masters is None else self._masters.modules:
            one.refresh()
        lend(self.program, flow)
        stream = Stream(self.seed, self.step, self.replica * self._flow.count, self._next_evaluation())
        found = flow.rank.forward(inputs, stream, size_of=flow.size_of(rows))
        take_back(self.program, flow)
        self._transport.doing = Doing()
        weights = self._weighed(micros, flow.parts(rows)) if flow.has_loss else flow.parts(rows)
        self._weight = sum(weights)
        return flow.join(found, self.reduction.shares(weights))

    def _next_evaluation(self) -> int:
        """The number of an evaluation among those at this step: each draws numbers of its own, training its own."""
        step, number = self.evaluated
        self.evaluated = self.step, number + 1 if step == self.step else 1
        return self.evaluated[1]

    def follow(self, modes: Modes) -> None:
        """Take on these modes; a program for them is made if there is none, on all ranks together."""
        self.modes = modes
        # one that returns more than the loss of training waits for the first call
        if modes != self._surface.modes:
            self.make_missing()

    def make_missing(self) -> None:
        """Make the program for the modes, for batches like the example, if there is none; on all ranks together."""
        if not self.has_program():
            self._made(None)

    @property
    def wants_all(self) -> bool:
        """True if a call gives what the original returns, not its loss alone."""
        return self._returns_all and not self.loss_alone

    def has_program(self) -> bool:
        """True if there is a program for the modes, for batches like the example, that returns what is wanted."""
        if self.training and not self._flow.is_whole:
            return True
        modes = self.modes
        return self._for_example(modes) is not None if self._trains_example(modes) else bool(self._flows(modes))

    def _trains_example(self, modes: Modes) -> bool:
        """True in training as the module was captured, where batches are those of the example."""
        return self.training and modes == self._surface.modes

    def _for_example(self, modes: Modes) -> Flow | None:
        form = self._flow.form
        return next((flow for flow in self._flows(modes) if flow is self._flow or flow.form == form), None)

    def _flows(self, modes: Modes) -> list[Flow]:
        """The programs for the modes that return what is wanted."""
        found = [flow for others, flow in self._others if others == modes]
        if modes == self._surface.modes and self._flow.is_whole:
            found.insert(0, self._flow)
        if not self._returns_all:
            return found
        # a step needs the loss alone, if there is one
        return [flow for flow in found if (flow.gives_all if self.wants_all else flow.gives_loss)]

    def _number(self, flow: Flow) -> int:
        return [one for _, one in self._others].index(flow)

    def known_flow(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow | None:
        """The program for a batch, if there is one."""
        if self.training and not self._flow.is_whole:
            return self._flow
        modes = self.modes
        if self._trains_example(modes) and not self._flow.form.other_flags(args, kwargs):
            # a batch of another form is refused
            return self._for_example(modes)
        return next((flow for flow in self._flows(modes) if flow.fits(args, kwargs)), None)

    def flow_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow:
        """The program for a batch. One is made if no program has its arguments: in training for other flags and words,
        in evaluation for all."""
        flow = self.known_flow(args, kwargs)
        if flow is None:
            self.make_missing()
            flow = self.known_flow(args, kwargs) or self._made((tuple(args), dict(kwargs)))
        if flow is not self._flow and flow.is_whole:
            # the very same parameters: gradients of evaluation are theirs too
            flow.program.share(self._flow.program)
        return flow

    def _made(self, batch: Arguments | None) -> Flow:
        assert self._make_flow is not None, "this module was made for training only"
        modes = self.modes
        self.refuse_outside(None)
        flow = self._make_flow(batch, modes, self.wants_all)
        # pieces may hold a parameter in other layouts: what they read of training is looked up by layout (`lend`)
        wrong = [
            name
            for module in flow.modules
            for name, index in module.stored.items()
            if name not in self.program.stored or (flow.is_whole and self.stored[name] != index)
        ]
        if wrong:
            raise self._refused(
                f"the program for these modes would store {wrong[0]} on another rank than training does",
                "a plan that puts all that reads it into one stage: pp=N,stages=...; or a plan without stages",
            )
        self._take_in(flow)
        if flow.is_whole:
            flow.program.after_backward = self.gradients_came
        self._others.append((modes, flow))
        return flow

    # A step.

    @on_all_ranks
    @plainly
    def forward_backward(self, batch: Any, scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward, of all micro-batches; gradients, `scale` times, are added to what was there, the loss
        is returned.

        Args:
            batch: the replica's, the same on every rank of it; None if there is none for it in this step.
        """
        if self._flow.is_whole:
            if batch is None:
                raise self._refused(*NO_BATCH)
            loss = loss_of(self, batch)
            times(times(loss, self._count()), scale).backward()
            return loss.detach()
        if not torch.is_grad_enabled():
            raise self._refused(*NO_GRADIENT)
        flow = self._flow
        self.refuse_surroundings(flow)
        micros, rows = ([], 0) if batch is None else self.cut(flow, *self.arranged(*arguments_of(batch)))
        weights = self._weighed(micros, flow.parts(rows))
        told = self._totals(rows, sum(weights))
        inputs = self._begin(flow, "pipeline", micros, [int(one) for one, _ in told])
        self.begin_training([tensor for one in inputs for tensor in one], compare=self._is_checked)
        counts = self.reduction.counts(weights, [weight for _, weight in told])
        everybody = {size for one, _ in told for size in flow.size_of(int(one))}
        alike = len({one for one, _ in told}) == 1
        losses = self._accumulate(
            inputs, counts, scale=scale, size_of=flow.size_of(rows), completes=frozenset() if alike else everybody
        )
        self._transport.doing = Doing()
        self.step += 1
        self._weight, self.losses = sum(weights), tuple(losses)
        self._warn_of_nan(losses, weights)
        if not losses:
            return torch.zeros((), device=self._transport.device)
        return reduced(losses, self.reduction.shares(weights))

    def _count(self) -> float:
        """What the batch of this step counts in gradients that are averaged over replicas."""
        if self.num_replicas == 1 or (self.reduction.how == "mean" and not self._flow.form.sizes):
            # all replicas have as many rows
            return 1.0
        (count,) = self.reduction.counts([self._weight], [one for (one,) in self._totals(self._weight)])
        return count

    def _weigh(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> None:
        rows = next((int(tensor.shape[0]) for tensor in inputs if tensor.dim()), 1)
        (self._weight,) = self._weighed([(args, kwargs)], [rows])

    def cut(self, flow: Flow, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Arguments], int]:
        """The micro-batches of a batch, and its rows; refuses one of another form than the example's."""
        try:
            return flow.cut(args, kwargs)
        except (BatchMismatch, TooFewRows) as error:
            raise self._refused(str(error), FORM) from None

    def missing_sizes(self, batch: Any) -> list[int]:
        """Sizes of micro-batches of a batch for training that no program is for yet; refuses what is no such batch."""
        if batch is None:
            return []
        micros, rows = self.cut(self._flow, *self.arranged(*arguments_of(batch)))
        self._weighed(micros, self._flow.parts(rows))
        return self._flow.missing([rows])

    def _begin(self, flow: Flow, kind: str, micros: Sequence[Arguments], rows: Sequence[int]) -> list[list[Tensor]]:
        """The inputs of micro-batches. Whatever is missing is made first: all ranks know what all replicas have."""
        if any(one.rank.is_left for one in (self._flow, *(other for _, other in self._others))):
            raise self._refused(*LEFT)
        for size in flow.missing(rows):
            assert self._make_size is not None, "this module was made for the example's sizes only"
            self._make_size(flow, size, self.modes)
        self.program.join_copies()
        if self._masters is not None:
            self._masters.join_copies()
        flow.refresh()
        inputs = [flow.bind(*one) for one in micros]
        self._is_checked = self._transport.begin_program(self.step, f"{kind} {rows}")
        if self._is_checked:
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
        rank, runs = self._flow.rank, bool(inputs or settings["completes"])
        if runs:
            first = self.replica * self._flow.count
            try:
                losses = rank.step(inputs, counts, self.seed, self.step, first=first, **settings)
            finally:
                if rank.is_left:
                    for parameter, earlier in zip(held, before, strict=True):
                        parameter.grad = earlier
            self._note_unused()
        for copy in self.program.copies:
            if copy.alike:
                copy.other.grad = None  # the first copy has the sum of all
        for parameter, earlier in zip(held, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        for one in () if self._masters is None else self._masters.modules:
            one.collect()
        self.gradients_came(self.program.trainable.keys() - (self._unused or ()) if runs else ())
        return losses

    def _note_unused(self) -> None:
        """In the first step of a pipeline: tell all ranks which parameters have got no gradient."""
        if self._unused is None and self.guard is not None:
            named = [one for module in self.program.modules for one in module.trained()]
            mine = [name for name, one in named if one.requires_grad and one.grad is None]
            self._unused = {name for told in tell_all(self._transport, mine) for name in told}

    # What it holds, by the original names.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the original's, once each, those of which the rank holds nothing as empty ones; a copy in another
        layout (of a further stage) stands under NAME@2."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        start = f"{prefix}." if prefix else ""
        yield from ((f"{start}{name}", copy.other) for name, copy in self.masters.apart.items())

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The original's state dict: whole tensors on the CPU, and the extra state of its modules. All ranks call this
        together.

        Args:
            rank0_only: ranks other than 0 get an empty dict, which saves them the memory.
        """
        self.compare_ranks(of_replica=True)
        extra = self.extra_states()
        found = full_state(self.masters, rank0_only=rank0_only)
        return {} if rank0_only and self._transport.whole.rank else {**found, **extra}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, copy in self.masters.apart.items():
            destination[prefix + name] = copy.other if keep_vars else copy.other.detach()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """What this rank holds, as `state_dict` gives it."""
        if assign:
            raise self._refused(*ASSIGN)
        known = self.state_dict()
        unexpected = [name for name in state_dict if name not in known]
        missing = [name for name in known if name not in state_dict]
        if strict and (unexpected or missing):
            what = f"knows no {unexpected[0]}" if unexpected else f"is given no {missing[0]}"
            remedy = "load what state_dict() of the same plan gave on this rank"
            if (
                unexpected
                and (original := shapes_of(self.program).get(unexpected[0])) is not None
                and original.persistent
            ):
                what, remedy = f"holds nothing of {unexpected[0]}, which is given", WHOLE
            raise self._refused(f"rank {self._transport.rank} {what}", remedy)
        return super().load_state_dict(state_dict, strict=strict)

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *told: list[str]
    ) -> None:
        """Asked by torch, of this module or of one that holds it. Copies are taken out: no submodule knows them."""
        missing_keys, _, error_msgs = told
        for name, one in self.local_state_dict().items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != one.shape:
                raise self._refused(
                    f"{name} is given with shape {list(given.shape)}, and rank {self._transport.rank} holds "
                    f"{list(one.shape)} of it",
                    WHOLE,
                )
        for name, copy in self.masters.apart.items():
            given = state_dict.pop(prefix + name, None)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != copy.other.shape:
                error_msgs.append(f"{prefix}{name} is {list(given.shape)}, on this rank {list(copy.other.shape)}")
            else:
                copy.other.copy_(given)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *told)
