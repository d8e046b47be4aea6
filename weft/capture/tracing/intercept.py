"""What torch.export would lose: opaque autograd functions, checkpoint regions, layer-drop of zero.

Enters: a running trace. Leaves: marker calls in the traced graph (operators of the library `weft`, which exist only
inside `intercept()`), and an `Interception` that says what they stand for.

- `autograd.Function`: export inlines forward and drops the user's backward. Each call becomes one
  `weft.function(key, tensors)`.
- The one behind torch's Dirichlet distribution draws, and so is a draw of its own, `weft.dirichlet(...)`.
- `weft.register_op`: the function is kept whole, in the same way.
- `torch.utils.checkpoint`: export erases it. The region becomes `weft.enter(...)` ... `weft.leave(...)`.
- Truth values that can go one way only while all is well become `weft.expect(...)`; see `expect.py`.
- `torch.rand([]) < 0.0`: a branch on data that can go one way only. It is answered with False.
- `torch.bincount(x, minlength=n)`: its length depends on values; see `stable.py`.
- Gradient hooks and `torch.autograd.grad` in forward: refused.

Promised: everything patched is put back, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import is_grad_enabled
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import _SingleLevelFunction
from torch.distributions.dirichlet import _Dirichlet
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.example import RAGGED_REMEDY
from weft.capture.functional import FOREIGN, fixed
from weft.capture.source import caller_is_users, place_here
from weft.capture.tracing.expect import define, expected_here
from weft.capture.tracing.opaque import Opaque, is_nested, opaque, original_apply
from weft.capture.tracing.properties import refuse_frozen
from weft.capture.tracing.reads import Reader
from weft.capture.tracing.refuse import TOLD, telling
from weft.capture.tracing.repeat import Call, Hear, Recorder
from weft.capture.tracing.stable import needs_grad, packs, padded_with_zeros, stable_form
from weft.capture.tracing.surroundings import Surroundings
from weft.errors import CaptureError
from weft.ops.arguments import bound
from weft.runtime.operators.custom import CustomOp
from weft.runtime.program.asks import GRAD_MODE, MEMORY_FORMAT, REQUIRES_GRAD

UNMARKED = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
    torch.ops.aten.rrelu.default,
)
"""Operators that may draw and that torch does not mark as random."""
DIRICHLET = "weft.dirichlet.default"
FUNCTION, ENTER, LEAVE = "weft.function.default", "weft.enter.default", "weft.leave.default"


@dataclass
class Interception:
    """What the markers of one trace stand for."""

    functions: list[Opaque] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    """For each function call, its outputs' tree with True where a tensor stands."""
    around: dict[int, Surroundings] = field(default_factory=dict)
    """What is around each function, by the identity of its class, before it first ran."""
    regions: int = 0
    requires: str = ""
    """The last line that told a tensor to require a gradient."""
    calls: Recorder = field(default_factory=Recorder)
    """Of the first forward."""
    repeats: bool = False
    """Forward runs again, to be compared."""
    grad: bool = True
    """The grad mode that forward is told."""
    asks: dict[str, str] = field(default_factory=dict)
    """What forward asks about its call, by kind, and the first line that does."""
    reader: Reader = field(default_factory=Reader)
    """What forward reads besides its inputs."""
    changed: set[str] = field(default_factory=set)
    """Names of containers that forward fills."""
    parameters: dict[int, str] = field(default_factory=dict)
    """The names of the module's, by identity."""
    held: frozenset[int] = frozenset()
    """The identities of its parameters and buffers."""
    attributes: dict[int, str] = field(default_factory=dict)
    """The names of tensors that its attributes are, by identity."""
    untrained: dict[int, str] = field(default_factory=dict)
    """The names of inputs that require no gradient, by identity."""
    trained: set[int] = field(default_factory=set)
    """The memory of parameters that forward reads and the module does not have."""

    def is_tracing(self) -> bool:
        """Whether the user's own code runs, not the inside of an operator."""
        return self.repeats or is_tracing()

    def ask(self, kind: str) -> None:
        """Note that forward asks something about its call, if it is the user's own code that does."""
        if kind not in self.asks and caller_is_users():
            self.asks[kind] = place_here()

    def ask_gradient(self, tensor: torch.Tensor) -> None:
        """Note that forward asks whether a tensor requires a gradient: on which parameters that depends."""
        if self.parameters and caller_is_users() and (names := parameters_behind(tensor, self.parameters)):
            self.reader.note_gradients(names)

    def refuse_foreign(self, call: Call) -> None:
        """Raise if a call changes a real tensor, one that was there before: in a trace it would change the user's. What
        a trace does not show here (running statistics, a view) is refused where it is converted."""
        for one in call.changed():
            if not is_fake(one) and not torch._C._functorch.is_functorch_wrapped_tensor(one):
                name = self.attributes.get(id(one), "")
                raise fixed("attribute" if name else FOREIGN, name, place_here())

    def refuse_trained(self, tensor: torch.Tensor, requires: bool = True) -> None:
        """Raise if an input is told to require a gradient: it belongs to the caller."""
        if requires and id(tensor) in self.untrained:
            name = self.untrained[id(tensor)]
            raise CaptureError(
                f"forward makes its input {name} require a gradient: the caller's {name} would get none",
                place=place_here(),
                remedy=f"call {name}.requires_grad_() before the call, on the batch and in the example; or work on "
                f"{name}.detach().requires_grad_()",
            )

    def repeat(self, run: Callable[[], Any], hear: Hear) -> Any:
        """Run forward once more, untraced; `hear` answers its calls."""
        kept, mine = dict(vars(self)), vars(self)
        mine.update(
            vars(
                Interception(
                    outputs=self.outputs, repeats=True, grad=self.grad, held=self.held, attributes=self.attributes
                )
            )
        )
        try:
            with disable_proxy_modes_tracing(), Listener(self, hear):
                return run()
        finally:
            mine.update(kept)

    def is_grad_enabled(self) -> bool:
        """Stands in for torch's: forward is told the mode of the call, everyone else that of the trace."""
        if not caller_is_users():
            return is_grad_enabled()
        self.ask(GRAD_MODE)
        return self.grad and is_grad_enabled()

    def encoder(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Stands in for the forward of torch's encoder while tracing."""

        def encode(
            encoder: Any, src: torch.Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
        ) -> torch.Tensor:
            if not packs(encoder, src, mask, src_key_padding_mask):
                return forward(encoder, src, mask, src_key_padding_mask, is_causal)
            if is_grad_enabled() and needs_grad(encoder, src):
                self.asks.setdefault(GRAD_MODE, place_here())
                if self.grad:
                    return forward(encoder, src, mask, src_key_padding_mask, is_causal)
            return padded_with_zeros(encoder, src, src_key_padding_mask)

        return encode

    def apply(self, cls: type, *args: Any) -> Any:
        """Stands in for `Function.apply` while tracing."""
        if not self.is_tracing():
            return original_apply(cls, *args)
        if cls is checkpoint.CheckpointFunction:
            run, _, *rest = args
            with self.region(reentrant=True, tensors=tensors_of(rest)):
                return run(*rest)
        if cls is _Dirichlet:
            return torch.ops.weft.dirichlet(*args)
        return self.mark(*opaque(cls, args))

    def call(self, op: CustomOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands in for the call of a registered function while tracing."""
        if not self.is_tracing():
            return op.function(*args, **kwargs)
        return self.mark(*opaque(op, (args, dict(kwargs))))

    def mark(self, function: Opaque, tensors: list[torch.Tensor]) -> Any:
        """Leave a marker for one call; what the function returns, with the marker's tensors in it."""
        function.refuse_objects()
        if id(function.cls) not in self.around:
            self.around[id(function.cls)] = Surroundings(torch.nn.Module(), [function.cls])
        key = len(self.functions)
        self.functions.append(function)
        made = torch.ops.weft.function(key, tensors)
        flat, out_spec = pytree.tree_flatten(self.outputs[key])
        given = iter(made)
        return pytree.tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in flat], out_spec)

    def infer(self, key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Shapes and dtypes of an opaque function's outputs; refuses one that writes into its inputs."""
        function = self.functions[key]
        with torch.no_grad(), Whole(function.what, tensors):
            outputs = function.outputs(function.arguments(tensors))
        self.functions[key] = replace(function, nested=is_nested(outputs))
        flat, spec = pytree.tree_flatten(outputs)
        kinds = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self.outputs[key] = pytree.tree_unflatten(kinds, spec)
        return [torch.empty_like(leaf) for leaf in flat if isinstance(leaf, torch.Tensor)]

    def restore(self) -> None:
        """Give what is around functions back what it held: they ran on fake tensors."""
        for one in reversed(self.around.values()):
            one.restore()

    @contextmanager
    def region(self, *, reentrant: bool, tensors: list[torch.Tensor]) -> Iterator[None]:
        """A checkpoint region: all that is traced inside is to be recomputed."""
        self.regions += 1
        number = self.regions
        torch.ops.weft.enter(number, reentrant, tensors)
        yield
        torch.ops.weft.leave(number)

    def checkpoint_generator(self, _function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        """Stands in for the generator that surrounds a non-reentrant checkpoint."""
        with self.region(reentrant=False, tensors=tensors_of((rest, kwargs))):
            yield


class _TensorMark:
    """Stands for a tensor in an output tree."""


TENSOR = _TensorMark()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_tracing() -> bool:
    """Whether the user's own code runs, not the inside of an operator."""
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is not None


class Listener(TorchFunctionMode):
    """Hears every torch function that forward calls.

    Answers `torch.rand(...) < c` with False where c <= 0: a uniform draw is never negative. Refuses what acts on
    autograd itself, which a trace does not see. Notes where a tensor is told to require a gradient.
    """

    def __init__(self, found: Interception, hear: Hear) -> None:
        super().__init__()
        self.found, self.hear = found, hear
        self.draws: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = Call.of(func, args, kwargs)
        self.found.refuse_foreign(call)
        return self.hear(call, call.heard(self.found.held), lambda: self.answer(func, args, kwargs))

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, in our way where the trace needs another."""
        refuse_frozen(func)
        if func in REFUSED:
            what, remedy = REFUSED[func]
            raise CaptureError(
                f"forward {what}, which a graph of the forward does not hold", place=place_here(), remedy=remedy
            )
        if func in LESS and len(args) == 2 and self.is_never_less(*args):
            return False
        if func in (torch.Tensor.requires_grad_, SET_REQUIRES_GRAD):
            self.found.requires = place_here()
            self.found.refuse_trained(args[0], *args[1:], *kwargs.values())
        if func in ASKS:
            self.found.ask(ASKS[func])
            if func == GET_REQUIRES_GRAD:
                self.found.ask_gradient(args[0])
            if func == GET_REQUIRES_GRAD and not self.found.grad and not args[0].is_leaf:
                # gradients are recorded in every trace
                return False
        traces = self.found.is_tracing()
        if func is torch.Tensor.__bool__ and traces and (expected := expected_here(args[0])) is not None:
            torch.ops.weft.expect(args[0], expected)
            return expected
        if func is torch.Tensor.item and traces and expected_here(args[0]) is not None:
            # a number that is only checked may stay a tensor
            return args[0].reshape(())
        stable = stable_form(func, args, kwargs)
        if stable is not None:
            return stable()
        with telling(*TOLD[func]) if func in TOLD else nullcontext():
            result = func(*args, **kwargs)
        if func is torch.rand and result.numel() == 1:
            self.draws.append(result)
        if func in MAKERS and kwargs.get("dtype") is None and result.is_floating_point() and caller_is_users():
            self.found.reader.note_default_dtype()
        return result

    def is_never_less(self, drawn: Any, limit: Any) -> bool:
        return isinstance(limit, int | float) and limit <= 0 and any(drawn is draw for draw in self.draws)


def parameters_behind(tensor: torch.Tensor, names: Mapping[int, str]) -> tuple[str, ...]:
    """The parameters that a tensor was made from; itself if it is one."""
    with torch._C.DisableTorchFunction():
        if id(tensor) in names:
            return (names[id(tensor)],)
        nodes, seen, found = [tensor.grad_fn], set[Any](), dict[str, None]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            found[name] = None
        nodes.extend(following for following, _ in node.next_functions)
    return tuple(sorted(found))


MAKERS = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.eye, torch.arange, torch.linspace}
    | {torch.rand, torch.randn, torch.logspace, torch.as_tensor, torch.scalar_tensor}
)
"""What gives tensors of torch's default dtype, unless told another."""
LESS = (torch.lt, torch.less, torch.Tensor.lt, torch.Tensor.__lt__, torch.Tensor.less)
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
GET_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
ASKS: Mapping[Any, str] = {
    GET_REQUIRES_GRAD: REQUIRES_GRAD,
    torch.Tensor.is_contiguous: MEMORY_FORMAT,
    torch.Tensor.stride: MEMORY_FORMAT,
    torch.Tensor.dim_order: MEMORY_FORMAT,
    torch.Tensor.as_strided: MEMORY_FORMAT,
    torch.as_strided: MEMORY_FORMAT,
}
"""Questions about tensors whose answers are no values."""
GRADIENT_REMEDY = "an autograd.Function with that backward, or do it outside forward"
REFUSED: Mapping[Any, tuple[str, str]] = {
    torch.Tensor.register_hook: ("registers a gradient hook", GRADIENT_REMEDY),
    torch.Tensor.backward: ("calls backward", GRADIENT_REMEDY),
    torch.autograd.grad: ("calls torch.autograd.grad", GRADIENT_REMEDY),
    torch.autograd.backward: ("calls torch.autograd.backward", GRADIENT_REMEDY),
    torch._pack_padded_sequence: ("packs a sequence (its shape depends on values)", RAGGED_REMEDY),
}


class Whole(TorchDispatchMode):
    """Refuses what would not stay inside an opaque function: draws, which could not be numbered, and changes of its
    operands, which the graph would not know of."""

    def __init__(self, what: str, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self.memory = {StorageWeakRef(one.untyped_storage()) for one in operands}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{self.what} draws random numbers ({func})",
                place=place_here(),
                remedy="draw in the module's forward and pass the numbers in",
            )
        if func._schema.is_mutable and self.writes(func, args, kwargs or {}):
            raise CaptureError(
                f"{self.what} changes its input in place ({func})",
                place=place_here(),
                remedy="work on a copy, x = x.clone(), and return it",
            )
        return func(*args, **(kwargs or {}))

    def writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """True if an operator writes into the memory of an operand."""
        given = bound(func, args, kwargs)
        written = [given[one.name] for one in func._schema.arguments if one.is_write]
        return any(StorageWeakRef(one.untyped_storage()) in self.memory for one in tensors_of(written))


@contextmanager
def intercept(*, grad: bool) -> Iterator[Interception]:
    """While this is entered, traced calls leave markers. `grad`: the grad mode that forward is told."""
    found = Interception(grad=grad)
    library = torch.library.Library("weft", "FRAGMENT")
    library.define("function(int key, Tensor[] tensors) -> Tensor[]")
    library.define("enter(int region, bool reentrant, Tensor[] tensors) -> ()")
    library.define("leave(int region) -> ()")
    library.define("dirichlet(Tensor concentration) -> Tensor")
    define(library)
    torch.library.register_fake("weft::function", found.infer, lib=library)
    torch.library.register_fake("weft::dirichlet", torch.empty_like, lib=library)
    torch.library.register_fake("weft::enter", lambda region, reentrant, tensors: None, lib=library)
    torch.library.register_fake("weft::leave", lambda region: None, lib=library)
    # Markers look dead to export's own clean-up, and so do some random operators, whose draws count even if dead.
    lasting = torch.fx.node._side_effectful_functions
    markers = {
        torch.ops.weft.dirichlet.default,
        torch.ops.weft.enter.default,
        torch.ops.weft.leave.default,
        torch.ops.weft.expect.default,
        *UNMARKED,
    } - set(lasting)
    lasting.update(markers)
    try:
        with (
            mock.patch.object(_SingleLevelFunction, "apply", classmethod(found.apply)),
            mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", found.checkpoint_generator),
            mock.patch.object(CustomOp, "__call__", lambda op, *args, **kwargs: found.call(op, args, kwargs)),
            mock.patch.object(torch, "is_grad_enabled", found.is_grad_enabled),
        ):
            yield found
    finally:
        lasting.difference_update(markers)
        library._destroy()
