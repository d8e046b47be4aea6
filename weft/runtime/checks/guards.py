"""Guards: what an optimizer does to a parallel module is what it would do on one device, or it is refused.

In: the modules of ranks that this process has, and an optimizer at the moment of its `step()`. Out: nothing, or an
error with a remedy. Parameters carry a Mark of their module's Guard; one hook of torch's, before every step of every
optimizer, looks for marks. Refused are: an optimizer that mixes elements of parameters which a rank stores in parts, or
parameters with each other where a rank lacks some; one that runs the model inside its update (a closure of torch's own
optimizers is run before it, once); one over the parameters of a module that was given to `parallelize`; torch's own
`clip_grad_norm_` and GradScaler where ranks hold different things.
Scaling is noticed by its effect: at the end of backward a few elements of gradients are remembered, and if gradients
were written to since, ranks tell each other the factor.
What was found out about an optimizer is kept with it: a step costs a few microseconds.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weft.errors import Refuse
from weft.runtime.checks.closures import Given, run_closure
from weft.runtime.checks.elementwise import MARK, Verdict, mixing_of, settings_of
from weft.runtime.checks.replicated import is_due
from weft.runtime.checks.scales import Scales, agreed, under_plain_scaler
from weft.runtime.checks.settings import Settings, noted, settings_for
from weft.runtime.checks.shard_rules import held_of
from weft.runtime.checks.shard_tensor import make_plain, plainly, show_again
from weft.runtime.checks.whole_state import PartOf, cut_state
from weft.runtime.training.combined_optimizer import CombinedOptimizer
from weft.runtime.watch.progress import Began

Most = Callable[[Tensor], Tensor]
"""From a number of the ranks here to the largest of all."""
Compare = Callable[[int, list[float]], list[float]]
"""From the number of an update and what the ranks here say to what all that hold something say; refuses where some say
nothing."""
Passed = Callable[[int], None]
"""Is told the number of each update that nothing is said of."""

NAME = "_weft_mark"
"""The attribute of parameters."""
CLIP = (
    "torch's clip_grad_norm_ takes the norm of what one rank holds, not of the model's gradients",
    "weft.clip_grad_norm_(parallel, max_norm)",
)
SCALED = (
    "gradients were scaled by different factors on different ranks",
    "weft.clip_grad_norm_(parallel, max_norm) to clip them; weft.GradScaler to scale a loss",
)
ALONE = (
    "gradients were changed on rank {0} of a replica and not on rank {1}",
    "change gradients on all ranks alike, empty ones too (no `if p.grad.numel()`); clip with "
    "weft.clip_grad_norm_(parallel, max_norm); weigh by the loss, or the learning rate of a group",
)
SCALER = (
    "torch's GradScaler decides on each rank by itself whether gradients are finite: some ranks would not update",
    "scaler = weft.GradScaler(...)",
)
REPLACED = (
    "the optimizer holds parameters of the module that was given to parallelize(), which are not trained any more",
    "make the optimizer afterwards: torch.optim.AdamW(parallel.parameters())",
)
SHARED = (
    "the optimizer holds a parameter of shape {0} of the module that was given to parallelize(), beside the parallel "
    "module's own: what shares it outside trains it apart from that one",
    "parallelize a module that holds all that shares it, such as body and head together; or leave the original out of "
    "the optimizer",
)
SPREAD = "add `spread` to the plan: each parameter lies whole on one rank; or use an elementwise one (AdamW, SGD)"


@dataclass(frozen=True)
class Mark:
    """What a parameter says of itself, which `refuse` makes an error of. Saved or copied it says nothing.

    Args:
        guard: of the module that it is part of; None: of one that a parallel module has replaced.
    """

    guard: weakref.ref[Guard] | None = None
    refuse: Refuse | None = None

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()


NO_MARK = Mark()


@dataclass(frozen=True)
class RankParameters:
    """What one rank holds.

    Args:
        trained: the trained parameters by name, empty ones of those of which it holds nothing.
        cut: those of them that are a part only, and which.
        complete: it holds every trained parameter of the model, whole.
    """

    trained: tuple[tuple[str, nn.Parameter], ...]
    cut: Mapping[str, PartOf]
    complete: bool

    @property
    def holds(self) -> bool:
        """It holds elements of some parameter."""
        return any(one.numel() for _, one in self.trained)


@dataclass(eq=False)
class Guard:
    """Watches over the parameters of a parallel module, as far as this process has them.

    Args:
        ranks: what each of its ranks here holds.
        num_ranks: of a replica.
        alike: every rank of the replica holds every trained parameter, whole.
        most: gives the largest of the numbers of all ranks of the replica; compare: from numbers of the ranks here to
            those of all before an update, of ranks that say something; passed: is told of one of which nothing is said.
        holders: the ranks that hold something. The others have no gradients that could be written to.
        began: is told of each forward in training, and of how many of those before it an update followed.
        waits: to read a number the host waits for a device: scales are looked at before some updates only (`is_due`).
    """

    ranks: tuple[RankParameters, ...]
    num_ranks: int
    alike: bool
    refuse: Refuse
    most: Most
    compare: Compare
    holders: tuple[int, ...]
    passed: Passed = lambda update: None
    began: Began = lambda made: None
    waits: bool = False
    scales: tuple[Scales, ...] = ()
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    module: weakref.ref[nn.Module] | None = None
    """What it watches over."""
    _warned: bool = False
    _seen: tuple[Any, ...] = ()
    _update: int = -1
    _forwards: int = 0
    _updated: int = 0
    is_updated: bool = False
    """Since the last forward."""
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    """Those that update its parameters."""

    watches_scales: bool = field(init=False)
    """A rank that scales its gradients by itself does wrong."""

    def __post_init__(self) -> None:
        self.watches_scales = len(self.holders) > 1 and not self.alike
        self.scales = tuple(Scales([one for _, one in rank.trained]) for rank in self.ranks)
        # of what it has no element of, others may have all
        held = [(name, one, rank.cut) for rank in self.ranks for name, one in rank.trained if one.numel()]
        self._cut = {id(one): name for name, one, cut in held if name in cut}
        for rank in self.ranks:
            for _, parameter in rank.trained:
                self.mark(parameter)
        _register(shards=not self.alike)

    def mark(self, parameter: nn.Parameter) -> None:
        """From now on optimizers over it are looked at."""
        vars(parameter)[NAME] = Mark(weakref.ref(self), self.refuse)

    def remember(self, rank: int | None = None) -> None:
        """Gradients are as they are to be: from now on they are watched; those of one of the ranks here, or of all."""
        if self.watches_scales and self._looks:
            for one in self.scales if rank is None else (self.scales[rank],):
                one.remember()

    @property
    def _looks(self) -> bool:
        """Before the next update ranks look at scales: the same on all of them."""
        return not self.waits or is_due(self._updated)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that mixes what lies apart. Each class and kind of settings is tried once. What it has
        loaded of whole parameters is cut as these are."""
        self._refuse_twice([optimizer])
        for group in optimizer.param_groups:
            mine = [one for one in group["params"] if guard_of(one) is self]
            dims = {one.dim() for one in mine if id(one) in self._cut}
            if mine and (dims or not self.alike):
                self._refuse_mixing(optimizer, group, dims or {mine[0].dim()}, mine)
        for rank in self.ranks:
            cut_state(optimizer, {one: rank.cut[name] for name, one in rank.trained if name in rank.cut})

    def _refuse_mixing(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], dims: set[int], mine: Sequence[nn.Parameter]
    ) -> None:
        key = (settings_of(optimizer, group), frozenset(dims))
        if key not in self.verdicts:
            self.verdicts[key] = mixing_of(optimizer, group, dims)
        verdict, kind = self.verdicts[key], type(optimizer).__name__
        wrong = next((one for one in mine if id(one) in self._cut and one.dim() in verdict.elements), None)
        if verdict.parameters:
            raise self.refuse(
                f"{kind} mixes the parameters of a model with each other, and ranks hold different ones",
                "a plan in which every rank holds every parameter (dp), or AdamW, SGD or another elementwise optimizer",
            )
        if wrong is not None:
            name = self._cut[id(wrong)]
            raise self.refuse(
                f"{kind} mixes the elements of a parameter, and this rank stores a part of {name} only", SPREAD
            )
        if not verdict.known:
            warnings.warn(
                f"{kind} could not be tried on small parameters: if it mixes elements of a parameter, training on "
                "parts gives other numbers than on one device; weft verify tells",
                stacklevel=2,
            )

    def _refuse_twice(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A parameter that stands in two groups, or two optimizers, would be updated twice in a step."""
        held = Counter(id(one) for each in optimizers for one in _all(each))
        twice = [name for rank in self.ranks for name, one in rank.trained if held[id(one)] > 1]
        if twice:
            raise self.refuse(
                f"{twice[0]} stands more than once among the parameters of the optimizer{'s' * (len(optimizers) > 1)}: "
                "a step would update it as often",
                "put each parameter into one group of one optimizer",
            )

    def settings(self) -> dict[int, int]:
        """What optimizers were set to, by the identity of parameters."""
        return noted(self.optimizers)

    @property
    def num_updates(self) -> int:
        """Made before the forward that goes on."""
        return self._updated

    def begin(self) -> None:
        """A forward in training begins."""
        # several optimizers may update what a rank holds, and one what another does
        if self.is_updated:
            self._updated, self.is_updated = self._updated + 1, False
            # a step that raised has left them ordinary ones
            if not self.alike:
                show_again(one for rank in self.ranks for _, one in rank.trained)
        self.began((self._forwards, self._updated))
        self._forwards += 1

    @plainly
    def look_at_scales(self) -> None:
        """A step is about to be made, of gradients that were not scaled on one rank alone."""
        if len(self.ranks) < self.num_ranks and under_plain_scaler():
            raise self.refuse(*SCALER)
        self._update += 1
        if self._looks and any(one.written for one in self.scales):
            self._compare([one.factor() for one in self.scales])
        else:
            self.passed(self._update)

    def _compare(self, mine: list[float]) -> None:
        factors = self.compare(self._update, mine)
        self.remember()
        if not agreed(factors, max(one.tolerance for one in self.scales)):
            raise self.refuse(*SCALED)
        if not self._warned and all(one == 1 for one in factors):
            self._warned = True
            warnings.warn(
                "gradients were written to and are the same: if that was torch's clip_grad_norm_, it saw what one rank "
                "holds, not the norm of all gradients; use weft.clip_grad_norm_",
                stacklevel=2,
            )

    @plainly
    def refuse_others(self, optimizers: Sequence[Any]) -> None:
        """Refuse optimizers that do not hold all parameters that are to be trained."""
        for one in optimizers:
            if isinstance(one, type) or not (hasattr(one, "step") and hasattr(one, "zero_grad")):
                raise self.refuse(
                    f"{one!r} is no optimizer", "torch.optim.AdamW(parallel.parameters()), or one written like it"
                )
            if isinstance(one, torch.optim.LBFGS):
                raise self.refuse(
                    "LBFGS runs the model inside its step, as often as it likes", "use an optimizer without a closure"
                )
        known = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        if len(known) < len(optimizers):
            return  # whoever writes an optimizer of another kind knows what it holds
        trained = [(name, one) for rank in self.ranks for name, one in rank.trained if one.requires_grad]
        seen = (
            len(trained),
            *((weakref.ref(one), sum(len(group["params"]) for group in one.param_groups)) for one in known),
        )
        if seen == self._seen:
            return
        self._refuse_twice(known)
        held = {id(one) for each in known for one in _all(each)}
        missing = [name for name, one in trained if id(one) not in held]
        if missing and len(missing) == len(trained):
            gone = any(_is_replaced(one) for each in known for one in _all(each))
            raise self.refuse(*(REPLACED if gone else NONE_OF_IT))
        if missing:
            raise self.refuse(
                f"the optimizer does not hold {missing[0]}, which is to be trained",
                "give it parallel.parameters(); freeze what stays as it is with requires_grad_(False); several "
                "optimizers go as a list: train_step(batch, [first, second])",
            )
        self._seen = seen


NONE_OF_IT = (
    "the optimizer holds no parameter of the module",
    "torch.optim.AdamW(parallel.parameters()): the rank's own parameters are what it updates",
)


def guard_of(parameter: Any) -> Guard | None:
    """The guard of the module that a parameter is part of."""
    guard = _mark_of(parameter).guard
    return None if guard is None else guard()


def _mark_of(parameter: Any) -> Mark:
    """What a parameter says of itself; nothing if it has no mark."""
    mark = vars(parameter).get(NAME) if isinstance(parameter, nn.Parameter) else None
    return mark if isinstance(mark, Mark) else NO_MARK


def mark_replaced(parameters: Iterable[nn.Parameter], refuse: Refuse) -> None:
    """Say of parameters that a parallel module has taken their place."""
    for parameter in parameters:
        if parameter.requires_grad:
            vars(parameter)[NAME] = Mark(None, refuse)


@dataclass(frozen=True, slots=True)
class _Watched:
    """What was found out about an optimizer: the guards of its parameters, and how many it had then.

    Args:
        shards: its parameters that are held in part: ordinary ones while it steps.
        replaced: its parameters that a parallel module has taken the place of.
        settings: of its steps.
    """

    guards: tuple[weakref.ref[Guard], ...]
    counts: list[int]
    shards: tuple[nn.Parameter, ...]
    replaced: tuple[nn.Parameter, ...]
    settings: Settings


PARAMS = itemgetter("params")


def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
    """The hook of every optimizer's step. Gives what it is given instead, if that is something else."""
    watched: _Watched | None = optimizer.__dict__.get(MARK)
    groups = optimizer.param_groups
    if watched is None or list(map(len, map(PARAMS, groups))) != watched.counts:
        watched = _look_at(optimizer)
        if watched is None:
            return None
    settings, given = watched.settings, None
    for original in watched.replaced:
        if original.grad is not None:
            raise vars(original)[NAME].refuse(SHARED[0].format(list(original.shape)), SHARED[1])
    if kwargs or len(args) > 1:
        several = [guard for one in watched.guards if (guard := one()) is not None and guard.num_ranks > 1]
        given = run_closure(optimizer, args, kwargs, several[0].refuse) if several else None
    settings.num_steps += 1
    # hardly ever others than in the step before
    try:
        is_same = list(map(tuple, map(dict.values, groups))) == settings.last
    except (RuntimeError, ValueError):  # of other tensors, which are compared element by element
        is_same = False
    if not is_same:
        settings.note(groups)
    for one in watched.guards:
        if (guard := one()) is not None:
            guard.is_updated = True
            if guard.watches_scales:
                guard.look_at_scales()
    if watched.shards:
        make_plain(watched.shards)
    return given


def _look_at(optimizer: torch.optim.Optimizer) -> _Watched | None:
    """Find out all about an optimizer; None if it is none of ours."""
    if isinstance(optimizer, CombinedOptimizer):
        return None  # each of them has its own
    guards = list({id(guard): guard for one in _all(optimizer) if (guard := guard_of(one)) is not None}.values())
    replaced = tuple(filter(_is_replaced, _all(optimizer)))
    if not guards:
        # they get no gradient any more; who goes on with the original gives them some
        if replaced and all(one.grad is None for one in replaced):
            raise vars(replaced[0])[NAME].refuse(*REPLACED)
        return None
    for guard in guards:
        guard.check(optimizer)
        guard.optimizers.add(optimizer)
    if _look_again not in optimizer._optimizer_load_state_dict_post_hooks.values():
        optimizer.register_load_state_dict_post_hook(_look_again)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    shards = tuple(one for one in _all(optimizer) if held_of(one) is not None)
    found = _Watched(tuple(map(weakref.ref, guards)), counts, shards, replaced, settings_for(optimizer))
    vars(optimizer)[MARK] = found
    return found


def after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook after it."""
    watched: _Watched | None = vars(optimizer).get(MARK)
    if watched is not None:
        show_again(watched.shards)


def _look_again(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that has loaded another state is looked at as a new one."""
    vars(optimizer).pop(MARK, None)


def _register(*, shards: bool) -> None:
    """Add the hooks, if they are not there; the one after steps where somebody holds shards."""
    if before_step not in _global_optimizer_pre_hooks.values():
        register_optimizer_step_pre_hook(before_step)
    if shards and after_step not in _global_optimizer_post_hooks.values():
        register_optimizer_step_post_hook(after_step)


def _all(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _is_replaced(parameter: Any) -> bool:
    mark = _mark_of(parameter)
    return mark.guard is None and mark.refuse is not None
