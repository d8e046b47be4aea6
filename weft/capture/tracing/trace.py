"""Runs torch.export over the module.

Enters: module and flattened example. Leaves: a `Trace`: the exported program (pre-dispatch ATen, still with in-place
operators and grad-mode regions), what its markers stand for, and how the output nests. The module's parameters are
never read: export works on fake tensors of the same shapes. Promised: the module, its mode and all random states are
as before, also after an error; an error names the user's line.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.distributions.gamma import Gamma
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.proxy import TracerBase
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from weft.capture.example import Example, Output, dynamic_shapes, flatten_output
from weft.capture.sizes import refuse_fixed
from weft.capture.source import (
    caller_is_forward,
    frames_of_forward,
    is_users,
    place_here,
    users_frame,
)
from weft.capture.tracing.caches import MODE, SIZE, Caches
from weft.capture.tracing.intercept import Interception, Listener, intercept
from weft.capture.tracing.modules import to_where_it_is, without_computed
from weft.capture.tracing.properties import Attached
from weft.capture.tracing.refuse import translating
from weft.capture.tracing.repeat import Comparer, unchanged
from weft.capture.tracing.stable import forward_of_batch_norm, not_causal, rsample_of_gamma
from weft.capture.tracing.surroundings import Surroundings
from weft.capture.tracing.watch import Update, Watch, memory_of
from weft.errors import CaptureError
from weft.runtime.weights.precision import Precision, Rules

GRAD_MODE = "weft_grad_mode"
"""The key of a node's meta under which its grad mode is kept."""

SEEDS = "forward seeds torch's generator, so that each step would draw the same numbers: a program draws others in each"
CLOCK = "forward reads the clock: the time would be frozen into the program"
FILES = "forward asks for a file: what it finds would be frozen into the program"
FILES_REMEDY = "read it outside forward, and pass it in as an input or keep it in a buffer"
UNSEEN: Sequence[tuple[Any, Sequence[str], str, str]] = (
    (
        torch,
        ("manual_seed", "seed", "set_rng_state"),
        SEEDS,
        "draw the numbers once, in __init__, and keep them in a buffer; seed with parallelize(..., seed=)",
    ),
    (
        torch.random,
        ("manual_seed", "seed", "set_rng_state", "fork_rng"),
        SEEDS,
        "draw the numbers once, in __init__, and keep them in a buffer; seed with parallelize(..., seed=)",
    ),
    (
        time,
        ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"),
        CLOCK,
        "measure outside forward; pass a time in as an input",
    ),
    (builtins, ("open",), FILES, FILES_REMEDY),
    (os, ("stat", "listdir", "scandir"), FILES, FILES_REMEDY),
    (os.path, ("exists", "isfile", "isdir", "getmtime", "getsize"), FILES, FILES_REMEDY),
    (Path, ("open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "stat"), FILES, FILES_REMEDY),
)
"""Functions of others that forward must not call: where they lie, their names, why, what to do instead."""

QUESTIONS: Sequence[tuple[Any, str]] = (
    (torch.compiler, "is_compiling"),
    (torch.compiler, "is_exporting"),
    (torch._dynamo, "is_compiling"),
    (torch._utils, "is_compiling"),
)
"""Functions that say whether forward is being compiled: where they lie, their names."""


@dataclass(frozen=True)
class Trace:
    """A finished trace."""

    program: ExportedProgram
    found: Interception
    output: Output
    settling: bool
    """Forward changed a plain object or value; see `watch.py`."""
    kept: bool
    """Forward kept tensors or sizes for its next call; see `caches.py`."""

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode that all fake tensors of the program belong to."""
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch._subclasses.FakeTensor):
                return value.fake_mode
        return FakeTensorMode(allow_non_fake_inputs=True)


class Traced(nn.Module):
    """What export sees: flat tensors in, flat tensors out, the user's module inside, watched."""

    def __init__(
        self,
        module: nn.Module,
        example: Example,
        found: Interception,
        seen: Callable[[tuple[Output, Watch, bool]], None],
        shapes: Sequence[Mapping[int, Any] | None],
        *,
        tolerant: bool,
        varying: Sequence[Mapping[int, Any] | None],
    ) -> None:
        super().__init__()
        self.real = dict(module.named_buffers())
        self.attached = Attached(module, dict(zip(example.names, example.values, strict=True)))
        self.module = module
        self.training = module.training
        self.example, self.found, self.seen, self.tolerant = example, found, seen, tolerant
        self.shapes, self.varying = shapes, varying

    def run(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The user's forward."""
        precision = self.example.precision
        given = tensors if precision is None else precision.inputs(tensors)
        named = zip(self.example.names, self.example.values, given, strict=True)
        self.found.untrained = {id(one): name for name, value, one in named if not value.requires_grad}
        args, kwargs = self.example.arguments(given)
        with nullcontext() if precision is None else Rules(precision):
            return self.module(*args, **kwargs)

    def run_otherwise(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The user's forward in the other mode."""
        modes = [(sub, sub.training) for sub in self.module.modules()]
        try:
            for sub, _ in modes:
                sub.training = not self.training
            return self.run(tensors)
        finally:
            for sub, mode in modes:
                sub.training = mode

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run = partial(self.run, tensors)
        watch, surroundings = Watch(self.module, tolerant=self.tolerant), Surroundings(self.module)
        self.found.parameters = {id(one): name for name, one in self.module.named_parameters()}
        self.found.held = frozenset(map(id, (*self.module.parameters(), *self.module.buffers())))
        self.found.attributes = {id(one): ".".join(filter(None, key)) for key, one in watch.attributes.items()}
        try:
            # translated here already: torch prints the whole graph beside an error of its own
            inputs = dict(zip(self.example.names, tensors, strict=True))
            with (
                translating(self.module),
                Listener(self.found, self.found.calls),
                self.attached.shown(self.module, inputs),
            ):
                result = run()
            refuse_fixed(self.module, self.example, tensors, self.shapes)
            self.found.changed.update(surroundings.filled())
            watch.refuse_changes(run)
            if watch.settling and any(self.varying):
                watch.kept, watch.settling = True, False
            self.found.changed.update(one.name for one in watch.changes() if watch.kept)
            caches = Caches(watch, surroundings, self.found, self.steady())
            is_kept = watch.kept or bool(surroundings.kept())
            filled = caches.filled(self.found.calls, result, run) if is_kept and not any(self.shapes) else None
            if not watch.settling and not self.found.calls.transformed:
                after = Watch(self.module)
                watch.restore()
                if watch.kept:
                    watch.restore_objects()
                surroundings.clear_caches()

                def repeat() -> None:
                    self.found.repeat(run, Comparer(self.found.calls))

                with (
                    translating(self.module),
                    unchanged(surroundings.again(), watch, repeat),
                    self.attached.shown(self.module, inputs),
                    self.found.reader.reading(),
                ):
                    repeat()
                if filled is not None and watch.kept:
                    caches.judge(filled, run, self.others(tensors), strict=any(self.varying))
                after.restore()
            written = {memory_of(one) for call in self.found.calls.made for one in call.changed()}
            write_updates(watch.updates(run, written))
            output, leaves = flatten_output(result)
        finally:
            watch.restore()
            if watch.kept:
                watch.restore_objects()
            self.found.restore()
            surroundings.restore()
        self.seen((output, watch, is_kept))
        return tuple(leaves)

    def steady(self) -> dict[int, torch.Tensor]:
        """The values of buffers that forward did not replace, by the tensors that stand for them."""
        held = dict(self.module.named_buffers())
        values = {id(held[name]): one for name, one in self.real.items() if id(held.get(name)) in self.found.held}
        return {key: one for key, one in values.items() if one.device.type != "meta" and not is_fake(one)}

    def others(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], Any]]:
        """The user's forward in the other mode, and in other sizes: of dims that vary, or with other rows."""
        rows = [{0} if one.shape[:1] == tensors[0].shape[:1] else () for one in tensors]
        varying = self.varying if any(self.varying) else rows
        with disable_proxy_modes_tracing():
            larger = [
                one.new_empty([size * 2 if dim in (dims or ()) else size for dim, size in enumerate(one.shape)])
                for one, dims in zip(tensors, varying, strict=True)
            ]
        return {MODE: partial(self.run_otherwise, tensors), SIZE: partial(self.run, tuple(larger))}


def write_updates(updates: Sequence[Update]) -> None:
    """Give buffers their new values: all are taken before the first is written, for buffers may change places."""
    if not updates:
        # export cuts a graph apart where the grad mode changes, which takes as long as the trace
        return
    with torch.no_grad():
        others = [{memory_of(one) for one, _ in updates if one is not old} for old, _ in updates]
        pairs = zip(updates, others, strict=True)
        taken = [new.clone() if memory_of(new) in memory else new for (_, new), memory in pairs]
        for (old, _), new in zip(updates, taken, strict=True):
            old.copy_(new)


def trace(
    module: nn.Module,
    example: Example,
    dynamic: Mapping[str, tuple[int, ...]],
    *,
    tolerant: bool = False,
    asked: list[str] | None = None,
    varying: Mapping[str, tuple[int, ...]] | None = None,
) -> Trace:
    """Export the module on fake tensors.

    Args:
        tolerant: plain objects and values that forward changes stay changed.
        asked: forward, if it asks whether it is being compiled, is told no, and the files that asked are added here;
            if this is None it is told yes.
        varying: dims whose size may vary though this trace is of one size.
    """
    outputs: list[tuple[Output, Watch, bool]] = []
    shapes = tuple(dynamic_shapes(example, dynamic))
    states = torch.get_rng_state()
    with ExitStack() as stack:
        stack.enter_context(without_computed(module))
        found = stack.enter_context(intercept(grad=example.grad))
        others = dynamic_shapes(example, varying or {})
        traced = Traced(module, example, found, outputs.append, shapes, tolerant=tolerant, varying=others)
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(quiet_torch())
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_rng_state, states)
        stack.callback(Watch(module).restore)
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        for held, name, _, fake in list(fakes_of(module, example.precision, fake_mode, moved=True)):
            held[name] = fake
        warnings.simplefilter("ignore")
        written = written_when_called(fx.GraphModule.recompile)
        stack.enter_context(mock.patch.object(fx.GraphModule, "recompile", written))
        stack.enter_context(mock.patch.object(TracerBase, "create_node", noting(TracerBase.create_node, found.trained)))
        stack.enter_context(mock.patch.object(_BatchNorm, "forward", forward_of_batch_norm))
        stack.enter_context(mock.patch.object(Gamma, "rsample", rsample_of_gamma))
        stack.enter_context(mock.patch.object(transformer, "_detect_is_causal_mask", not_causal))
        encode = found.encoder(transformer.TransformerEncoder.forward)
        stack.enter_context(mock.patch.object(transformer.TransformerEncoder, "forward", encode))
        stack.enter_context(mock.patch.object(nn.Module, "to", to_where_it_is))
        # a mode hears nothing of the one, and of the other what it calls itself
        stack.enter_context(mock.patch.object(torch, "from_numpy", torch.as_tensor))
        for owner, names, what, remedy in UNSEEN:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, refused(getattr(owner, name), what, remedy)))
        if asked is not None:
            for owner, name in QUESTIONS:
                answer = told_no(getattr(owner, name), asked.append)
                stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(translating(module))
        program = torch.export.export(traced, stand_ins(example), dynamic_shapes={"tensors": shapes}, strict=False)
    output, watch, is_kept = outputs[-1]
    for (path, name), value in watch.values.items():
        # export puts attributes back by itself
        module.get_submodule(path).__dict__[name] = value
    return Trace(program, found, output, watch.settling, is_kept)


def noting(create: Callable[..., fx.Node], trained: set[int]) -> Callable[..., fx.Node]:
    """`create`, of nodes that know their line, and whether gradients were recorded when they were made.

    The memory of parameters that the module does not have is added to `trained`: export takes them for constants.

    Export would look at each frame of the process to find the line. It has regions for grad modes, and loses those that
    lie directly in an autocast and those of inference mode.
    """

    def create_node(tracer: TracerBase, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        tracer.record_stack_traces = False
        node = create(tracer, kind, target, *args, **kwargs)
        held = getattr(vars(tracer).get("root"), target, None) if kind == "get_attr" else None
        if isinstance(held, nn.Parameter) and held.requires_grad:
            trained.add(memory_of(held))
        node.meta[GRAD_MODE] = torch.is_grad_enabled()
        if not node.stack_trace and (frame := users_frame(frames_of_forward())) is not None:
            node.stack_trace = "".join(StackSummary.from_list([frame]).format()).strip()
        return node

    return create_node


def written_when_called(write: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], None]:
    """Stands in for what writes Python for a graph: export does so after each of its passes, and nobody reads it."""

    def recompile(module: fx.GraphModule) -> None:
        def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            write(self)
            return self.forward(*args, **kwargs)

        # each graph module has a class of its own
        type(module).forward = forward

    return recompile


def refused(function: Callable[..., Any], what: str, remedy: str) -> Callable[..., Any]:
    """`function` for everyone but the user's own forward."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if caller_is_forward():
            raise CaptureError(what, place=place_here(), remedy=remedy)
        return function(*args, **kwargs)

    return call


def told_no(answer: Callable[[], bool], note: Callable[[str], None]) -> Callable[[], bool]:
    """`answer` for torch, which is compiling; False for everyone else. Notes the files that asked."""

    def ask() -> bool:
        file = sys._getframe(1).f_code.co_filename
        if not is_users(file):
            return answer()
        note(file)
        return False

    return ask


@contextmanager
def quiet_torch() -> Iterator[None]:
    """While this is entered, torch logs nothing: what it would say about an error, the error says in our words."""
    loggers = [
        logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "torch"
    ]
    saved = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in saved:
            logger.disabled = disabled


def stand_ins(example: Example) -> tuple[torch.Tensor, ...]:
    """A tensor of its own for every input: export takes one object given twice for a single input."""
    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, requires_grad=value.requires_grad)
        for value in example.values
    )


Fake = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""A parameter or buffer: the dict that holds it, its name there, itself, and a fake tensor in its place."""


def fakes_of(module: nn.Module, precision: Precision | None, mode: FakeTensorMode, *, moved: bool) -> Iterator[Fake]:
    """Fake CPU tensors for parameters and buffers, in the precision that they are computed with.

    Args:
        moved: only for those that lie on another device, or nowhere (meta), or have another precision.
    """
    lowered = set[int]()
    if precision is not None:
        masters = precision.masters(module)
        named = module.named_parameters(remove_duplicate=False)
        lowered = {id(one) for name, one in named if name in masters and one.dtype != precision.compute}
    made: dict[int, torch.Tensor] = {}
    for sub in module.modules():
        for stored in (vars(sub)["_parameters"], vars(sub)["_buffers"]):
            for name, value in stored.items():
                if value is None or (moved and value.device.type == "cpu" and id(value) not in lowered):
                    continue
                if id(value) not in made:
                    with mode:
                        dtype = precision.compute if precision is not None and id(value) in lowered else value.dtype
                        fake = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="cpu")
                    is_parameter = isinstance(value, nn.Parameter)
                    made[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake
                yield stored, name, value, made[id(value)]
