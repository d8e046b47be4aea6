"""Emulated: all ranks of a parallel module as threads of this process, behind the calls of one.

In: a function that makes a rank's module on its transport. Out: a module whose call gives the loss of rank 0, or what
the original returns, and whose backward runs every rank's: all get the same gradients, and those of inputs are rank
0's. `parameters()` are those of all ranks, so that one elementwise optimizer updates them all, as one per rank would;
`state_dict()` is the original module's: whole tensors under the original names. The rank threads live as long as the
module; when a rank fails, all end, and the error names it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.compile.programs import Wanted
from weft.errors import RunError
from weft.runtime.checks.guarded import guard_all
from weft.runtime.checks.guards import CLIP
from weft.runtime.checks.shard_tensor import plainly
from weft.runtime.checks.unchanged import ASSIGN, UNCALLED, hooks_of
from weft.runtime.checks.wrapping import REDRAWN, handed_out, on_all_ranks, redraws
from weft.runtime.layout.execute import take
from weft.runtime.program.batch import BatchMismatch
from weft.runtime.program.calling import Signed
from weft.runtime.program.module import TWICE
from weft.runtime.program.stored import shapes_of
from weft.runtime.program.surface import Modes, Surface
from weft.runtime.training.parallel import NO_FORWARD, NO_GRADIENT, Parallel
from weft.runtime.training.reduction import times
from weft.runtime.training.step import FORM, Stepping, loss_of
from weft.runtime.weights.ending import Returned, refuse_parts
from weft.runtime.weights.gradient import is_retained
from weft.runtime.weights.leaf_aliases import is_watched
from weft.runtime.weights.unsharded import SAVED, change_values, hooks_around
from weft.train.crew import Crew, Make, Work
from weft.train.opened import MakeFiles, refusal
from weft.verify.ranks import join


class Emulated(Stepping):
    """A parallel module with all of its ranks here.

    Args:
        make: makes a rank's module on its transport.
        prepare: is called before the ranks need a program, here and not in their threads.
        order: the place of each name in the original.
        surface: what the original shows besides.
    """

    replica, num_replicas = 0, 1
    ranks: nn.ModuleList

    def __init__(
        self, make: Make, num_ranks: int, prepare: MakeFiles, order: Mapping[str, int], surface: Surface
    ) -> None:
        super().__init__()
        self._prepare = prepare
        self._crew = Crew(num_ranks, make)
        self.__dict__["ranks"] = nn.ModuleList(self._crew.modules)
        self.hold_apart("ranks", self.ranks)
        originals = [shapes_of(module.program) for module in self._crew.modules]
        shapes = {name: found.shape for one in originals for name, found in one.items()}
        self._shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: order.get(name, len(order)))}
        self._saved = {name for one in originals for name, found in one.items() if found.persistent}
        self._anchor = torch.zeros((), requires_grad=True)
        self.guard = guard_all(self._crew.modules, refusal)
        self.guard.module = weakref.ref(self)
        tree = self.show_surface(surface, shows=False)
        for name, child in tree._modules.items():
            # the ranks hold what is saved and loaded under these names
            self.hold_apart(name, cast(nn.Module, child))
        for rank in self._crew.modules:
            rank.share_modes(self)
        for path, shown in {"": self, **self._paths}.items():
            shown.ask_as(self._first._paths[path] if path else self._first)
        tree.assign_by({name: partial(self._set_buffer, name) for name in surface.buffers() if name in self._shapes})
        self.__dict__["_assigned"] = tree._assigned

    def _refused(self, message: str, remedy: str) -> Exception:
        return refusal(message, remedy)

    def _set_buffer(self, name: str, value: Any) -> None:
        """Give the ranks their parts of a whole buffer."""
        wrong = self._wrong(name, value)
        if wrong is not None:
            raise refusal(wrong, "set a tensor of the shape that the buffer has")
        for rank in self._crew.modules:
            rank.assign_buffer(name, value)

    @property
    def step(self) -> int:
        """How many forwards in training there were, on every rank."""
        return self._first.step

    @step.setter
    def step(self, step: int) -> None:
        for rank in self._crew.modules:
            rank.step = step

    @property
    def seed(self) -> int:
        """Of the random streams of every rank."""
        return self._first.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        for rank in self._crew.modules:
            rank.seed = seed

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This one and those of all ranks, which hold the parameters, named as `named_parameters` names these."""
        own = {id(module) for module in self.shown().values()}
        return (one for one in super().named_modules(memo, prefix, remove_duplicate) if id(one[1]) not in own)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with the modules of all ranks, and with this one."""
        for rank in self._crew.modules:
            rank.apply(fn)
        fn(self)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of all ranks: the original names, each with `ranks.0.`, `ranks.1.` ... before it."""
        for start, rank in self._by_rank(prefix):
            yield from rank.named_parameters(start, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Those of all ranks, named likewise."""
        for start, rank in self._by_rank(prefix):
            yield from rank.named_buffers(start, recurse, remove_duplicate)

    def _by_rank(self, prefix: str) -> Iterator[tuple[str, Parallel]]:
        start = f"{prefix}." if prefix else ""
        return ((f"{start}ranks.{number}", rank) for number, rank in enumerate(self._crew.modules))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of all ranks."""
        return handed_out(
            list(super().parameters(recurse)), lambda: refusal(*CLIP) if len(self._crew.modules) > 1 else None
        )

    @Signed
    @on_all_ranks
    @plainly
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, as every rank has it."""
        args, kwargs = self.arranged(args, kwargs)
        if self.training and not self._first.has_forward:
            raise refusal(*NO_FORWARD)
        self._refuse_surroundings()
        self._prepare_for(args, kwargs)
        if not torch.is_grad_enabled() or not self._first.has_forward:
            return self._crew.each(lambda module: module(*args, **kwargs))[0]
        call = _Call(self._crew, (args, kwargs))
        shown = [one for one in super().parameters() if one.requires_grad and not is_watched(one)]
        # each has a node of its own, where the caller's hooks are, and what the ranks returned stays theirs
        tensors = [one.clone() for one in _Ranks.apply(self._anchor, call, *call.wanted, *shown)]
        call.returned.outputs = [weakref.ref(one) for one in tensors]
        return call.output(tensors)

    def _refuse_surroundings(self) -> None:
        """Here, where the caller's line is known: a rank that fails ends all."""
        self._follow()
        hooks = hooks_around() if torch.is_grad_enabled() else None
        if hooks is not None and change_values(hooks):
            raise refusal(*SAVED)
        for module in self._crew.modules:
            module.refuse_surroundings()

    @property
    def _first(self) -> Parallel:
        return self._crew.modules[0]

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The loss of each micro-batch of the last step of a pipeline, before they were reduced."""
        return self._first.losses

    def _prepare_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A batch that no program is for is refused here: a rank that fails ends all. What is missing is made here."""
        if not self._first.has_program():
            self._first.refuse_outside(None)
            self._make_missing()
        flow = self._first.known_flow(args, kwargs)
        self._first.refuse_outside(flow)
        if flow is None:
            self._prepare(Wanted(modes=self.modes, batch=(args, kwargs), outputs=self._first.wants_all))
        elif not flow.is_whole:
            for rows in flow.missing([self._first.cut(flow, args, kwargs)[1]]):
                self._prepare(Wanted(modes=self.modes, batch=flow.batch, rows=rows, outputs=self._first.wants_all))
        else:
            if redraws(flow.program):
                raise refusal(*REDRAWN)
            try:
                flow.bind_whole(args, kwargs)
            except BatchMismatch as error:
                raise refusal(str(error), FORM) from None

    @on_all_ranks
    @plainly
    def forward_backward(self, batch: Any, scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward of all ranks; gradients, `scale` times, are added to what was there, the loss is
        returned."""
        if self._first.has_forward:
            loss = loss_of(self, batch)
            times(loss, scale).backward()
            return loss.detach()
        if not torch.is_grad_enabled():
            raise refusal(*NO_GRADIENT)
        if any(hooks_of(self)):
            raise refusal(*UNCALLED)
        self._refuse_surroundings()
        self._first.refuse_outside(None)
        # what is no batch is refused, and what is missing made, here: a rank that fails ends all
        for rows in self._first.missing_sizes(batch):
            self._prepare(Wanted(evaluation=False, rows=rows))
        losses: list[Tensor] = self._crew.each(lambda module: module.forward_backward(batch, scale))
        return losses[0]

    def over_replicas(self, loss: Tensor) -> Tensor:
        """The loss over the batches of all replicas: there is one."""
        return loss

    def follow(self, modes: Modes) -> None:
        """Take on these modes; the program for them is compiled if there is none."""
        self.modes = modes
        self._follow()

    def _follow(self) -> None:
        """Put the ranks into the modes that this module shows. What is missing for them is made here."""
        modes = self.modes
        if modes != self._first.modes:
            if modes != self._surface.modes and (self._first.has_forward or not self.training):
                self._prepare(Wanted(modes=modes, outputs=self._first.wants_all))
            self._crew.each(lambda module: module.follow(modes))

    def _make_missing(self) -> None:
        """Let the ranks have the program for the modes; it is made here."""
        self._prepare(Wanted(modes=self.modes, outputs=self._first.wants_all))
        self._crew.each(lambda module: module.make_missing())

    def set_loss_alone(self, alone: bool) -> None:
        super().set_loss_alone(alone)
        for module in self._crew.modules:
            module.set_loss_alone(alone)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The original's state dict: whole tensors on the CPU; rank 0 is here."""
        whole = {name: one for name, one in self.state_dict().items() if name in self._shapes}
        return {**{name: one.detach().cpu().clone() for name, one in whole.items()}, **self.extra_states()}

    def on_ranks(self, work: Work) -> list[Any]:
        """Do something with every rank's module, in its thread; the results in rank order."""
        return self._crew.each(work)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The original module's: whole tensors, put together from the ranks' parts."""
        ranks = [(rank.local_state_dict(), rank.program.stored) for rank in self._crew.modules]
        for name in (name for name in self._shapes if name in self._saved):
            pieces = [(rank, held[name], part[name]) for rank, (part, held) in enumerate(ranks) if name in held]
            destination[prefix + name], faults = join(self._shapes[name], pieces)
            if faults:
                raise RunError(f"{name}: {'; '.join(faults)}", remedy="give the ranks one elementwise optimizer")
        destination.update({prefix + name: state for name, state in self.extra_states().items()})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Cut whole tensors into the ranks' parts; arguments as of `nn.Module.load_state_dict`."""
        for name, whole in state_dict.items():
            if (wrong := self._wrong(name, whole)) is not None:
                raise RunError(wrong, remedy="load a state dict of this very model")
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], strict: bool, *told: list[str]
    ) -> None:
        """Asked by torch, of this module or of one that holds it (`prefix` stands before the names): cut whole tensors
        into the ranks' parts, if they are those of the original."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, metadata, strict, *told)
        missing_keys, unexpected_keys, error_msgs = told
        if metadata.get("assign_to_params_buffers"):
            raise refusal(*ASSIGN)
        given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        extra = self._surface.extra_states()
        saved = self._saved | extra.keys()
        self.check_extra_states(given)
        missing_keys += [prefix + name for name in (*self._shapes, *extra) if name in saved and name not in given]
        unexpected_keys += [prefix + name for name in given if strict and name not in saved]
        wrong = [found for name, whole in given.items() if (found := self._wrong(name, whole)) is not None]
        error_msgs += wrong
        for rank in self._crew.modules:
            stored = rank.program.stored
            mine = {name: take(whole, stored[name]) for name, whole in given.items() if name in stored and not wrong}
            copies = {} if wrong else rank.masters.apart
            mine |= {name: take(given[copy.name], copy.index) for name, copy in copies.items() if copy.name in given}
            rank.load_state_dict(mine, strict=False)

    def _wrong(self, name: str, whole: Any) -> str | None:
        """Why a tensor is not that of the original, if it is not."""
        if name not in self._shapes or (isinstance(whole, Tensor) and tuple(whole.shape) == self._shapes[name]):
            return None
        found = f"has shape {list(whole.shape)}" if isinstance(whole, Tensor) else f"is a {type(whole).__name__}"
        return f"{name} {found}, planned as {list(self._shapes[name])}"


class _Call:
    """One call of all ranks: what each was given, of which a gradient is wanted, and the leaves that it returned."""

    _ran: Sequence[tuple[list[Tensor], list[Any], pytree.TreeSpec]]

    def __init__(self, crew: Crew, batch: Any) -> None:
        self._crew, self.spent, self.returned = crew, False, Returned()
        self._leaves, self._spec = pytree.tree_flatten(batch)
        self._grads = [at for at, one in enumerate(self._leaves) if isinstance(one, Tensor) and one.requires_grad]
        self.wanted = [self._leaves[at] for at in self._grads]
        """Tensors of the batch whose gradient the caller wants."""

    def forward(self) -> list[Tensor]:
        """The tensors that rank 0 returns."""
        self._ran = self._crew.each(self._forward)
        return _tensors(self._ran[0][1])

    def _forward(self, module: Parallel) -> tuple[list[Tensor], list[Any], pytree.TreeSpec]:
        leaves = list(self._leaves)
        for at in self._grads:
            leaves[at] = leaves[at].detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return [leaves[at] for at in self._grads], *pytree.tree_flatten(module(*args, **kwargs))

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """What rank 0 returns, with these in place of its tensors."""
        _, found, spec = self._ran[0]
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in found], spec)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """Backward of every rank from its tensors that need a gradient; the gradients of what rank 0 was given.

        `retain`: another may come."""

        def work(module: Parallel, ran: tuple[Any, list[Any], Any]) -> None:
            pairs = zip(_tensors(ran[1]), gradients, strict=True)
            live = [(root, one.to(root.device)) for root, one in pairs if root.requires_grad and one is not None]
            for one in ran[0]:
                one.grad = None
            torch.autograd.backward([root for root, _ in live], [one for _, one in live], retain_graph=retain)

        with torch.enable_grad():
            self._crew.each(work, self._ran)
        return [one.grad for one in self._ran[0][0]]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Ranks(torch.autograd.Function):
    """What rank 0 returns as roots of autograd whose backward is that of every rank."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            found = call.forward()
        ctx.call, ctx.num_given = call, len(given)
        made = [tensor.detach() for tensor in found]
        # an output that the caller does not use has no gradient, here too
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(mine for mine, one in zip(made, found, strict=True) if not one.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_parts(ctx, refusal)
        ctx.call.returned.refuse_retained(gradients, refusal)
        if ctx.call.spent:
            raise refusal(*TWICE)
        retain = is_retained()
        ctx.call.spent = not retain
        found = ctx.call.backward(gradients, retain=retain)
        # the parameters are only there to be asked for: the ranks have their gradients
        return (None, None, *found, *(None,) * (ctx.num_given - len(found)))
