"""Unchanged: a rank's parameters are what its program was made for, or the next forward is refused.

In: the trees of containers that a module shows, as they are when it is made. Out: nothing, or what is wrong and what to
do instead: a parameter that was replaced, one of another dtype, one that was frozen when the program was made and is to
be trained now, one with other memory than the program has laid it in, a hook that nobody would call. A parameter that
is gathered is laid where others read it in the first steps: what looks at its memory from before is warned of.
`applied()` is what `to()`, `half()` and the like do: another dtype or device is refused, and other values are taken
into the memory that is there, which other tensors of the program look into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.runtime.checks.watched import Fact, Facts, looked_up
from weft.runtime.program.batch import dtype_name
from weft.runtime.weights.full_weights import LIES, place_of

Wrong = tuple[str, str]
"""What is wrong, and what to do instead."""

BOUND = (
    "a parallel module is bound to its ranks and their programs: it cannot be copied or pickled",
    "parallel.full_state_dict(), on every rank, has its values, to be saved; for another one like it call "
    "weft.parallelize() again and load_state_dict(parallel.state_dict())",
)
LOOKS = 4
"""Steps in which parameters may get other memory, where others read it, and one more."""
WITHIN = (
    "hooks of the parallel module itself are called; to see inside, edit the program: weft show FILE --plan P --out DIR"
)
UNCALLED = (
    "a model in pieces has a hook, which would not be called in training: it has no forward of its own there",
    "do before and after train_step() what the hook does; in evaluation hooks are called",
)
EQUAL: Sequence[Callable[[Tensor], Any]] = (
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
"""What is looked at of a parameter, beside where it stands."""
MODE = itemgetter("training")
ASSIGN = ("assign=True would put other tensors in place of those that the program uses", "load with assign=False")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A parameter and where it stands."""

    name: str
    holder: dict[str, nn.Parameter | None]
    key: str
    parameter: nn.Parameter
    dtype: torch.dtype
    trained: bool
    start: int
    memory: StorageWeakRef
    """Where it lay, and whether anything still does."""

    def wrong(self) -> Wrong:
        """It is not as it was: how."""
        if self.holder.get(self.key) is None:
            return (
                f"{self.name} was taken away, and the program goes on to use it",
                "change the model and call weft.parallelize() again; to leave it out for a while, set it to zero: with "
                "torch.no_grad(): parameter.zero_()",
            )
        if self.holder.get(self.key) is not self.parameter:
            return (
                f"another parameter was put in the place of {self.name}, which the program goes on to use",
                "change its values: with torch.no_grad(): parameter.copy_(values), or load_state_dict()",
            )
        if self.parameter.dtype != self.dtype:
            return converted(self.name, self.dtype, self.parameter.dtype)
        if self.is_swapped():
            return (
                f"{self.name} was given other memory (parameter.data = tensor), and its full weight is kept with this "
                "rank's shard in it: the program would not follow, and would write into what was there before",
                "keep values, not memory: backup = parameter.detach().clone(); with torch.no_grad(): "
                "parameter.copy_(values), and parameter.copy_(backup) afterwards",
            )
        return (
            f"{self.name} was frozen when its program was made, which does not bring its gradient together",
            "give parallelize() the model with all that will ever be trained, and freeze the rest afterwards with "
            "requires_grad_(False)",
        )

    def is_swapped(self) -> bool:
        """True if it does not lie where a program has laid it for good."""
        place = vars(self.parameter).get(LIES)
        return place is not None and place != place_of(self.parameter)

    def left_something(self) -> bool:
        """True if it has got other memory, and somebody still looks at what it had."""
        return self.parameter.data_ptr() != self.start and not self.memory.expired()


class Unchanged:
    """The parameters of a rank as they are now.

    Args:
        tree: containers that hold them by their original names.
        trained: names of those that get a gradient.
        around: what else is looked at with them.
    """

    def __init__(self, tree: nn.Module, trained: Collection[str], around: Iterable[Fact] = ()) -> None:
        self._shown = [
            _Shown(
                name,
                holder,
                key,
                parameter,
                parameter.dtype,
                name in trained,
                parameter.data_ptr(),
                StorageWeakRef(parameter.untyped_storage()),
            )
            for name, holder, key, parameter in _places(tree)
        ]
        self.trained = [(one.name, one.parameter) for one in self._shown if one.trained]
        self._num_looks = LOOKS
        self._inside = [(path, module) for path, module in tree.named_modules() if path]
        self._hooks = [held for _, module in self._inside for held in hooks_of(module)]
        self.facts = Facts(
            [*around, (MODE, vars(tree)), *((ask, one.parameter) for ask in EQUAL for one in self._shown)],
            looked_up((one.holder, (one.key,)) for one in self._shown),
            self._hooks,
        )
        """What is looked at in every step."""

    def note(self) -> None:
        """Nothing is wrong."""
        if not self._num_looks:
            self.facts.note()
            self.facts.state = object()

    def left(self) -> str | None:
        """A parameter that was laid elsewhere while something looks at where it lay. Looked for in the first steps, in
        which that happens, and told once."""
        found = next((one.name for one in self._shown if one.left_something()), None) if self._num_looks else None
        self._num_looks = 0 if found is not None else max(0, self._num_looks - 1)
        return found

    def wrong(self, *, training: bool) -> Wrong | None:
        """What has become of them that a program cannot follow."""
        for one in self._shown:
            held = one.parameter
            thawed = training and not one.trained and held.requires_grad
            if one.holder.get(one.key) is not held or held.dtype != one.dtype or thawed or one.is_swapped():
                return one.wrong()
        if any(self._hooks):
            hooked = next(path for path, module in self._inside if any(hooks_of(module)))
            return f"{hooked} has a hook, which would never be called: programs call no submodules", WITHIN
        return None


def hooks_of(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    """What is called when a module is, or its backward."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _places(tree: nn.Module) -> Iterator[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]]:
    for path, module in tree.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{key}" if path else key, module._parameters, key, parameter


def left_behind(name: str) -> str:
    return (
        f"{name} lies in other memory since it was first used, and something still looks at the old one (a "
        "state_dict(), a detached tensor or a view of it): that does not follow the weights any more; take it anew"
    )


def converted(name: str, before: torch.dtype, after: torch.dtype) -> Wrong:
    """Another dtype than the program's."""
    old, new = map(dtype_name, (before, after))
    return (
        f"{name} would be in {new}, and its program is for {old}",
        "weft.parallelize(..., precision='bf16') computes in another precision, with float32 masters of the weights; "
        f"or convert the model before: parallelize(model.to(torch.{new}), ...)",
    )


@torch.no_grad()
def applied(held: Collection[tuple[str, Tensor]], function: Callable[[Tensor], Tensor]) -> Wrong | None:
    """Apply to each tensor what leaves it where it is; tells what would not, before anything is changed."""
    for name, one in held:
        # without content: it is the same for all of that kind
        tried = function(one.new_empty((0,) * one.dim()))
        if tried.dtype != one.dtype:
            return converted(name, one.dtype, tried.dtype)
        if tried.device != one.device:
            return (
                f"{name} would go from {one.device} to {tried.device}, and its rank works on {one.device}",
                "parameters of a parallel module lie on the device of their rank; the original may lie anywhere",
            )
    for _, one in held:
        for tensor in (one, one.grad):
            found = None if tensor is None else function(tensor)
            if tensor is not None and found is not None and found.data_ptr() != tensor.data_ptr():
                tensor.copy_(found)
    return None
