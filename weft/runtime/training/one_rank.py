"""OneRank: what a rank's share of a model tells and refuses, whatever its program does.

In: the rank's program on the transport of a replica, and how losses are reduced. Out: what is stored, which replica
this is, the step as one call, a loss over all replicas.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.errors import Refuse
from weft.runtime.checks.batch_checksum import batch_number, other_batch
from weft.runtime.checks.guards import CLIP, Guard
from weft.runtime.checks.outside import Outside
from weft.runtime.checks.rank_tensor import RankTensor
from weft.runtime.checks.replicated import Replicated
from weft.runtime.checks.shard_tensor import plainly
from weft.runtime.checks.unchanged import UNCALLED, Unchanged, applied, hooks_of, left_behind
from weft.runtime.checks.watched import Fact, Facts, remedy_for
from weft.runtime.checks.wrapping import around, handed_out, ordinary
from weft.runtime.layout.execute import take
from weft.runtime.layout.index import nothing, size
from weft.runtime.layout.transfer import Index
from weft.runtime.links.replicas import Replica
from weft.runtime.program.batch import BatchMismatch, dtype_name
from weft.runtime.program.module import ParallelModule
from weft.runtime.program.surface import Modes, Surface
from weft.runtime.training.flow import Flow, MakeFlow, MakeSize
from weft.runtime.training.pieces import Pieces, hold_all
from weft.runtime.training.reduction import BadReduction, Reduction
from weft.runtime.training.step import Stepping
from weft.runtime.weights.leaf_aliases import has_hook_after
from weft.runtime.weights.masters import Masters

LOOKS = 2
"""Steps in which the batches of replicas are compared."""


class OneRank(Stepping):
    """One rank of a parallel model.

    Args:
        flow: the program for training.
        pieces: its programs on this rank, as one.
        masters: of the parameters of all pieces, if they compute in another precision.
        seed: of the random streams.
        make_flow: makes the programs of `eval()`; make_size: more sizes of micro-batches.
        reduction: what the batches of micro-batches and replicas count, in `forward_backward` and `train_step`; a
            backward that the user starts averages replicas.
        refusal: makes the error for a wrong call.
        surface: what the original shows.
        returns_all: a call gives what the original returns, where that is more than a loss.
    """

    def __init__(  # noqa: PLR0913 - each is a fact about the rank
        self,
        flow: Flow,
        pieces: Pieces[ParallelModule],
        *,
        masters: Pieces[Masters] | None = None,
        seed: int = 0,
        make_flow: MakeFlow | None = None,
        make_size: MakeSize | None = None,
        reduction: Reduction | None = None,
        refusal: Refuse | None = None,
        surface: Surface | None = None,
        returns_all: bool = False,
    ) -> None:
        super().__init__()
        self._flow, self._masters = flow, masters
        self.program = pieces
        """The programs for training of the rank's pieces, as one."""
        self._make_flow, self._make_size = make_flow, make_size
        self._returns_all = returns_all
        self._others: list[tuple[Modes, Flow]] = []
        """Programs for other modes, of evaluation, or that return more, and the modes that each is for."""
        self.seed, self.step = seed, 0
        self.reduction = reduction or Reduction()
        self._refusal = refusal
        self._weight = 0.0
        self._has_warned = False
        """Of a micro-batch whose loss is not a number."""
        self._are_alike = True
        """As far as is known, replicas are fed the same batches."""
        self.losses: tuple[Tensor, ...] = ()
        """The loss of each micro-batch of the last step, before they were reduced."""
        self.holds_all = all(
            name in pieces.stored and size(pieces.stored[name]) == part.shape
            for name, part in pieces.stored_parts().items()
            if part.persistent
        )
        """What is saved of the model is all on this rank."""
        self.in_autocast = False
        """The program was captured under autocast, and says so op by op."""
        self._remember: Callable[[], None] | None = None
        self._unchanged: Unchanged | None = None
        self._replicated: Replicated | None = None
        self._is_checked = False
        """Ranks make sure of everything in this step."""
        tree = self.show_surface(surface or Surface())
        self._empty = self.masters.empty(self._surface.marks.keys() | pieces.trainable.keys())
        """What stands for parameters of which the rank holds nothing: every rank lists all of the original's."""
        hold_all(self.masters, self._empty, tree)
        self._mark_parameters(tree)
        self._setters = self._buffer_setters()
        tree.assign_by(self._setters)
        self.__dict__["_assigned"] = tree._assigned
        for module in pieces.modules:
            module.trees.append(tree)
        if flow.is_whole:
            flow.program.after_backward = self.gradients_came
            if masters is None and self._transport.whole.num_ranks > 1:
                flow.program.read_apart()
        self._outside, self._looks = dict[Flow, Outside](), dict[Flow, Facts]()
        self._take_in(flow)

    def _mark_parameters(self, tree: nn.Module) -> None:
        """Write on parameters what the user has written on those of the original."""
        apart = [(copy.name, copy.other) for copy in self.masters.apart.values()]
        for name, parameter in (*tree.named_parameters(remove_duplicate=False), *apart):
            vars(parameter).update(self._surface.marks.get(name, {}))

    def _buffer_setters(self) -> dict[str, Callable[[Any], None]]:
        """What sets each buffer of the model, also one that other ranks hold, by every name."""
        parts = self.program.stored_parts().items()
        first = {each: name for name, part in parts for each in (name, *part.tied)}
        return {each: partial(self._set_buffer, first[each]) for each in self._surface.buffers() if each in first}

    def assign_buffer(self, name: str, value: Any) -> None:
        """Set a buffer by its dotted name."""
        self._setters[name](value)

    @torch.no_grad()
    def _set_buffer(self, name: str, value: Any) -> None:
        """Give a buffer another value: all of it, or what this rank holds of it."""
        part, index = self.program.stored_parts()[name], self.stored.get(name)
        here = None if index is None else size(index)
        if not isinstance(value, Tensor) or value.dtype != part.dtype or tuple(value.shape) not in (part.shape, here):
            is_tensor = isinstance(value, Tensor)
            told = f"{dtype_name(value.dtype)}{list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise self._refused(
                f"the buffer {name} is {dtype_name(part.dtype)}{list(part.shape)}, of which this rank holds "
                f"{'nothing' if here is None else list(here)}, and is set to {told}",
                "set all of it, or what the rank holds of it; load_state_dict() takes what state_dict() gave",
            )
        if index is not None:
            mine = take(value, index) if value.shape == part.shape else value
            with ordinary():
                held = mine.detach().to(self._transport.device).clone(memory_format=torch.contiguous_format)
            for module in self.program.modules:
                if name in module.stored:
                    module.update(name, held)

    def _take_in(self, flow: Flow) -> None:
        """A program that was just made: what its forward reads is to stay as it is."""
        reads, shown = flow.form.reads, {"": self, **self._paths}
        for one in shown.values():
            one.ask_for(reads)
        names = {name for _, name, _ in reads.asked}
        parts = {path: (vars(one), one.shown_names(), one.ours_of(names)) for path, one in shown.items()}
        # one rank is enough: all run the same script
        again = self._surface.rerun if self._transport.whole.rank == 0 else None
        rerun = str if again is None else again(flow.batch, self.modes)
        self._outside[flow] = Outside(reads, self._surface.owners, dict(self.named_parameters()), parts, rerun)
        if self._refusal is not None:
            for module in flow.modules:
                module.refusal = self._refusal

    @property
    def masters(self) -> Pieces[ParallelModule] | Pieces[Masters]:
        """What holds the parameters that the optimizer updates: the programs, or masters behind them."""
        return self.program if self._masters is None else self._masters

    @property
    def has_forward(self) -> bool:
        """Its forward can be called in training."""
        return self._flow.is_whole

    def watched_by(self, guard: Guard, remember: Callable[[], None]) -> None:
        """What optimizers do to its parameters is watched; when gradients are complete they are remembered."""
        self.guard, guard.module = guard, weakref.ref(self)
        self._remember = remember if guard.watches_scales else None
        trained = {each for name, part in self.program.trained_parts().items() for each in (name, *part.tied)}
        self._unchanged = Unchanged(self, trained, [fact for fact, _, _ in self._around()])
        stored = self.program.stored
        held = [(name, stored[name], one) for name, one in self.named_parameters() if name in stored]
        self._replicated = Replicated(held, self.program.stored_parts(), self._transport.whole, guard.settings)

    @plainly
    def gradients_came(self, others: Iterable[str]) -> None:
        """They are complete; also those of parameters of which this rank holds nothing: `others`."""
        for one in (self._empty[name] for name in others if name in self._empty):
            if one.requires_grad and one.grad is None:
                one.grad = torch.empty_like(one)
        self.gradients_are_right()

    def gradients_are_right(self) -> None:
        """They were scaled, on all ranks alike."""
        if self._remember is not None:
            self._remember()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What the rank's optimizer updates, and empty ones for what other ranks' do."""
        return handed_out([parameter for _, parameter in self.named_parameters(recurse=recurse)], self._no_clip)

    def _no_clip(self) -> Exception | None:
        guard = self.guard
        return guard.refuse(*CLIP) if guard is not None and guard.watches_scales else None

    @cached_property
    def stored(self) -> Mapping[str, Index]:
        """What this rank holds of each parameter of the original, and of the buffers that it holds."""
        lacks = [(name, self.program.parts[name]) for name in self._empty]
        empty = {each: nothing(part.shape) for name, part in lacks for each in (name, *part.tied)}
        return {**empty, **self.program.stored}

    @property
    def replica(self) -> int:
        """The number of the replica that this rank is part of: which share of the data it is to be fed."""
        return self._transport.number

    @property
    def num_replicas(self) -> int:
        return self._transport.num_replicas

    @property
    def _transport(self) -> Replica:
        return self.program.transport

    def over_replicas(self, loss: Tensor) -> Tensor:
        """The loss of the last step over the batches of all replicas. All ranks call this together."""
        if self.num_replicas == 1:
            return loss
        # nobody waits for the loss
        mine = loss.detach().double().reshape(1)
        told = torch.cat([mine, torch.full_like(mine, self._weight)])
        losses, weights = torch.stack(self._transport.whole.all_gather(told, self._transport.twins)).unbind(1)
        if self.reduction.sums:
            return losses.sum()
        return torch.where(weights > 0, losses * weights, 0.0).sum() / weights.sum()

    def _totals(self, *mine: float) -> list[tuple[float, ...]]:
        """Numbers of every replica, the same on all ranks."""
        return self._transport.whole.tell(mine, self._transport.twins)

    def _weighed(self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], rows: Sequence[int]) -> list[float]:
        """What batches weigh."""
        try:
            return self.reduction.weights(batches, rows)
        except BadReduction as error:
            raise self._refused(str(error), "let the reduction give a weight of at least 0") from None

    def _warn_of_nan(self, losses: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Warn, once, of a micro-batch whose loss is a mean over nothing, which makes that of the step not a number."""
        if len(losses) < 2 or self._has_warned or self._transport.rank:
            return
        if type(losses[0]) is not Tensor or losses[0].device.type != "cpu":
            return  # without values, or what takes time to be looked at
        counted = [at for at, weight in enumerate(weights) if weight]
        wrong = [at for at in counted if math.isnan(losses[at].item())]
        if wrong and len(wrong) < len(counted):
            self._has_warned = True
            warnings.warn(
                f"the loss of micro-batch {wrong[0]} of {len(losses)} is not a number, those of others are: if all of "
                "its labels are ignored its mean is over nothing, and so is the loss of the step. Let micro-batches "
                "count by their labels: parallelize(..., reduction=weft.per_token('labels'))",
                stacklevel=2,
            )

    def _refuse_other_batches(self, inputs: Sequence[Tensor]) -> None:
        other = other_batch(inputs, self._transport)
        if other is not None:
            raise self._refused(
                f"ranks {self._transport.rank} and {other} of a replica were given different batches",
                "give every rank of a replica the same whole batch; each takes its part itself",
            )

    @torch.no_grad()
    def _look_at_replicas(self, inputs: Sequence[Tensor]) -> None:
        """Warn of replicas that are fed the same batches in their first steps, each is to have its own, and of those
        whose forward makes other buffers of its own batches."""
        if self.num_replicas == 1:
            return
        buffers = [one for _, one in self.named_buffers()]
        batches, states = zip(*self._totals(float(batch_number(inputs)), float(batch_number(buffers))), strict=True)
        self._are_alike = self._are_alike and bool(inputs) and len(set(batches)) == 1
        if self.step < LOOKS - 1 or self._transport.whole.rank:
            return
        if len(set(states)) > 1:
            warnings.warn(
                f"buffers that forward updates, such as the running statistics of batch norm, differ between the "
                f"{self.num_replicas} replicas: each computes them of its own batches, and those of the first are "
                "saved. A plan for all ranks of the job (dp=...) computes them of all rows, as one device would",
                stacklevel=2,
            )
        if self._are_alike:
            warnings.warn(
                f"all {self.num_replicas} replicas were given the same batches in {LOOKS} steps: they compute the "
                "same, and train no faster than one. Feed each its own share: DistributedSampler(dataset, "
                "num_replicas=parallel.num_replicas, rank=parallel.replica)",
                stacklevel=2,
            )

    def begin_training(self, inputs: Sequence[Tensor], *, compare: bool) -> None:
        """A forward in training begins: how many updates there were before is compared between ranks, and in some
        steps, or if it is asked for, what they hold alike; in the first ones what replicas are fed."""
        if self.step < LOOKS:
            self._look_at_replicas(inputs)
        if self.guard is not None:
            self.guard.begin()
        if (replicated := self._replicated) is not None:
            replicated.num_trained += 1
            if compare or replicated.num_trained > replicated.due:
                self.compare_ranks()

    def begin_evaluation(self) -> None:
        """A forward in evaluation begins: if the weights are others than in the one before, ranks compare them."""
        if self._replicated is not None and self._replicated.is_trained:
            self.compare_ranks()

    def compare_ranks(self, *, of_replica: bool = False) -> None:
        """Refuse to go on with ranks that hold the same parameters and have other values. All ranks of the job call
        this together, or those of a replica."""
        if self._replicated is None:
            return
        whole = self._transport.whole
        ranks = self._transport.ranks if of_replica else tuple(range(whole.num_ranks))
        wrong = self._replicated.wrong_among(ranks) if of_replica else self._replicated.wrong()
        if wrong is None:
            return
        updates = 0 if self.guard is None else self.guard.num_updates
        made = dict(zip(ranks, whole.tell([updates], ranks), strict=True))
        why = ""
        if made[wrong.one] != made[wrong.other]:
            why = f": rank {wrong.other} has made {made[wrong.other][0]:.0f} updates, rank {wrong.one} "
            why += f"{made[wrong.one][0]:.0f}"
        raise self._refused(
            f"{wrong}{why}",
            "change, initialise and load parameters on all ranks alike (the same seed, the same file, no "
            "`if rank == 0`), make the same backwards and updates, and give the optimizers of all ranks the same "
            "settings; then start again from what was last saved",
        )

    def refuse_outside(self, flow: Flow | None) -> None:
        """Refuse to run a program whose forward would read other values than when it was made, or to make one (None):
        what was captured for training serves others in its modes."""
        if flow is None and self.modes != self._surface.modes:
            return
        if changed := self._outside[flow or self._flow].changed():
            raise self._refused(f"{changed}: the program has the value from before", remedy_for(changed))

    def refuse_surroundings(self, flow: Flow | None = None) -> object:
        """Refuse a forward under what its program knows nothing of, or that would read other values; where `_looks` are
        the same nobody needs to ask. Gives the state of parameters (`Facts`), None if that is not known."""
        if flow is not None:
            self.refuse_outside(flow)
        if self.training and not self._flow.is_whole:
            self._refuse_in_pieces()
        unchanged = self._unchanged
        if unchanged is None or unchanged.facts.state is None or not unchanged.facts.is_same():
            for (ask, one), right, wrong in self._around():
                if ask(one) != right:
                    raise self._refused(*wrong)
            if unchanged is None:
                return None
            self._refuse_changed(unchanged)
        if flow is not None and unchanged.facts.state is not None:
            self._looks[flow] = unchanged.facts.beside(self._outside[flow].facts)
        return unchanged.facts.state

    def _around(self) -> Iterator[tuple[Fact, Any, tuple[str, str]]]:
        return around("" if self.in_autocast else self._transport.device.type)

    def _refuse_in_pieces(self) -> None:
        if other := self.modes ^ self._surface.modes:
            raise self._refused(
                f"{min(other) or 'the module'} is in another mode (train or eval) than when the pipeline was made",
                "a pipeline trains in the modes that its model was in; set them before parallelize()",
            )
        if any(hooks_of(self)):
            raise self._refused(*UNCALLED)

    def _refuse_changed(self, unchanged: Unchanged) -> None:
        if (wrong := unchanged.wrong(training=self.training)) is not None:
            raise self._refused(*wrong)
        if (left := unchanged.left()) is not None:
            warnings.warn(left_behind(left), stacklevel=3)
        if self.training:
            self._refuse_hooks(unchanged)
        unchanged.note()

    def _refuse_hooks(self, unchanged: Unchanged) -> None:
        plain = self.masters is self.program
        several = self._transport.whole.num_ranks > 1 or not plain
        for name, parameter in unchanged.trained:
            if several and parameter._backward_hooks:
                raise self._refused(
                    f"{name} has a gradient hook, which would get an addend or a part of its gradient, or be left out",
                    "change gradients when they are complete: between backward() and optimizer.step(), or "
                    "train_step(..., prepare=FUNCTION)",
                )
            if has_hook_after(parameter) and (plain or parameter is self.program.part(name)):
                raise self._refused(
                    f"{name} has a hook for when its gradient was accumulated (register_post_accumulate_grad_hook),"
                    " which would be called before the gradient is complete, or never",
                    "update after backward(): optimizer.step(), or train_step(batch, optimizer); `zero=2` and "
                    "`zero=3` store gradients in parts, if it is for memory",
                )

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """What this rank holds, under the original names.

        Where that is not all of the model, its tensors are loaded, copied and computed with as any other, and refused
        where they are to be saved: one rank's file of them would be taken for the model (`rank_tensor.py`).
        """
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not (self.holds_all or keep_vars):
            start = args[1] if len(args) > 1 else prefix
            for name, held in found.items():
                if name.startswith(start) and isinstance(held, Tensor):
                    found[name] = RankTensor.of(held, self._refused)
        return found

    def local_state_dict(self) -> dict[str, Any]:
        """What this rank holds, as ordinary tensors: for files of which every rank writes, and reads, its own."""
        return dict(super().state_dict())

    # What a module can do, and a share of one cannot.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to()`, `half()` and the like: parameters stay where they are, in their dtype."""
        wrong = applied([*self.named_parameters(), *self.named_buffers()], fn)
        if wrong is not None:
            raise self._refused(*wrong)
        return self

    def _tell_raised(self, error: Exception) -> None:
        self._transport.whole.raised(error)

    def _refused(self, message: str, remedy: str) -> Exception:
        return BatchMismatch(message) if self._refusal is None else self._refusal(message, remedy)
