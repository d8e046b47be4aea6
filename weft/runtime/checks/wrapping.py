"""Wrapping: what others would make of a parallel module, refused, or kept away from it.

In: the frames above a walk over the modules of a parallel module; its methods. Out: the name of what wraps it, alone or
as part of another module: DistributedDataParallel, FSDP and the like look through all modules and parameters first, on
every rank. They would average, overwrite or shard what ranks hold different parts of.
`torch.compile` leaves programs as they are: which node of autograd was made when, and so which collective is started
when, is part of them. What is compiled around them is compiled.
Inference mode is kept away likewise: of what a parallel module makes in a call, much is kept for later ones.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import call, itemgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _recomputation_hook, _StopRecomputationError

from weft.runtime.checks.watched import Fact

WRAPPERS = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    ("torch.distributed._composable.contract", "wrapper"): "fully_shard, or replicate,",
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): "parallelize_module",
    ("torch.nn.parallel.replicate", "replicate"): "nn.DataParallel",
    ("deepspeed.runtime.engine", "__init__"): "DeepSpeed",
}
"""Functions that look through the modules that they wrap: where they are defined, and what users call them."""
DEPTH = 24
"""Frames between such a function and a module inside what it wraps."""
REASON = "a parallel module runs its programs as they were generated"
TRANSFORMED = (
    "a parallel module is called inside a transform of torch.func (grad, vjp, jvp, vmap ...) or under forward-mode AD, "
    "and its programs know backward only",
    "call it by itself and loss.backward(): gradients of inputs come where those of the example require one; other "
    "derivatives need the model on one device",
)
AUTOCAST = (
    "a parallel module is called under autocast, and was made without",
    "put torch.autocast into the forward of the model, or give parallelize() a precision: precision='bf16'",
)
REDRAWN = (
    "a parallel module whose forward draws random numbers (dropout) is called inside backward, where "
    "torch.utils.checkpoint computes again what it did before: it would draw others",
    "checkpoint inside of the model, or recompute=... in the plan: both draw the same",
)

AS_IT_IS = nullcontext()
Function = TypeVar("Function", bound=Callable[..., Any])


def wrapper() -> str | None:
    """What is about to wrap a module, if the caller was asked for its submodules by such."""
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        found = WRAPPERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found is not None:
            return found
    return None


def wrapped_by(name: str) -> tuple[str, str]:
    """What is wrong, and what to do instead."""
    return (
        f"{name} is given a parallel module, which brings its gradients together itself: the ranks hold different "
        f"parts, and {name} takes them for copies or for the whole",
        "train it as it is: loss = parallel(batch); loss.backward(); optimizer.step(). More processes than the plan is "
        "for train replicas, and dp=N with zero=1, 2 or 3 in the plan is what DDP and FSDP do. Wrap what stands beside "
        "it by itself",
    )


def handed_out(parameters: Sequence[nn.Parameter], refuse: Callable[[], Exception | None]) -> Iterator[nn.Parameter]:
    """Parameters, one by one, but not to torch's clip_grad_norm_."""
    if sys._getframe(1).f_code is inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__:
        error = refuse()
        if error is not None:
            raise error
    yield from parameters


def on_all_ranks(function: Function) -> Function:
    """A method that all ranks call together: an error that it raises on some ranks only is told to the others
    (`_tell_raised`), which would wait for them. What it makes is ordinary. torch.compile neither traces it nor looks
    into what it calls."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # most calls are under no hooks
        with to_its_end() if torch._C._autograd._top_saved_tensors_default_hooks(False) else AS_IT_IS:
            try:
                if torch.is_inference_mode_enabled():
                    with ordinary():
                        return function(self, *args, **kwargs)
                return function(self, *args, **kwargs)
            except Exception as error:
                self._tell_raised(error)
                raise

    return cast(Function, _uncompiled(call))


@contextmanager
def to_its_end() -> Iterator[None]:
    """torch ends the recomputation of a checkpoint (use_reentrant=False) by an error, where all is saved that backward
    needs. A call of a parallel module goes on to its end first: on all ranks it runs the same collectives."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None, None)
    if not getattr(pack, "__qualname__", "").startswith(f"{_recomputation_hook.__name__}."):
        yield
        return
    stopped = list[_StopRecomputationError]()

    @functools.wraps(pack)
    def packed(tensor: Tensor) -> Any:
        if not stopped:
            try:
                return pack(tensor)
            except _StopRecomputationError as error:
                stopped.append(error)
        return tensor

    with saved_tensors_hooks(packed, unpack):
        yield
    if stopped:
        raise stopped[0]


def redraws(program: Any) -> bool:
    """True in a forward inside backward, of a program that draws."""
    return bool(program.draws) and torch._C._current_graph_task_id() != -1


def around(device_kind: str = "") -> Iterator[tuple[Fact, Any, tuple[str, str]]]:
    """What a forward is not to be under, each with what is right and how it is refused; with a kind of device: nor
    under autocast for it."""
    yield (call, torch._C._functorch.peek_interpreter_stack), None, TRANSFORMED
    yield (itemgetter("_current_level"), vars(forward_ad)), -1, TRANSFORMED
    if device_kind:
        yield (torch.is_autocast_enabled, device_kind), False, AUTOCAST


@contextmanager
def ordinary() -> Iterator[None]:
    """Make ordinary tensors also where the caller is in inference mode, then without a graph: its own could neither be
    written to nor be used by autograd afterwards."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _uncompiled(function: Function) -> Function:
    # what torch.compiler.disable() does by a function around it, whose import takes a second
    hooks = torch._C._dynamo.eval_frame
    skip = hooks._FrameAction.SKIP
    hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(skip, skip))
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    return function
