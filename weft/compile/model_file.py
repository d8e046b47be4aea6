"""Model files: a Python file with `model()` and `example()`, and optionally `optimizer(parameters)`, `data()`,
`eval_data()`, `batch_dims()`, `reduction`, `precision()`; or `hf:FOLDER`, `hf:CONFIG_CLASS(...)` in its place.

In: a path. Out: a `Subject` whose module and example have been made and checked for kind. Promised: whatever is wrong
with the file becomes a `ModelFileError` that names the user's own line; nothing stays behind in `sys.modules`, except
what the file itself imports, and a file that defines operators, which no process can do twice.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.example import find_loss
from weft.capture.precision import chosen_precision
from weft.compile.hugging_face import PREFIX, load_hugging_face
from weft.errors import ModelFileError, WeftError, did_you_mean
from weft.plan.batch import BatchDims
from weft.runtime.operators.custom import as_module, keep, loaded
from weft.runtime.start.initialise import Start, begin
from weft.runtime.start.record import Record
from weft.runtime.training.combined_optimizer import as_one
from weft.runtime.training.reduction import BadReduction, Reduction
from weft.runtime.weights.precision import Mixed, Precision

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Data = Callable[[], Iterable[Any]]

LEFT = "take out the call of sys.exit(), or keep it for when the file is run by itself"


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a model that names none."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Subject:
    """What is verified: a module, the batch of one optimizer step, the optimizer.

    Args:
        example: a tuple of arguments, a dict of keyword arguments, or one tensor.
        batch_dims: the batch dim of each input, in order or by name, None for one without; dim 0 if not given.
        path: the model file, or None if the module was given in Python.
        data: gives the batches of the steps, one after the other; the example again and again if there is none.
        eval_data: gives the batches of an evaluation.
        reduction: how losses of micro-batches and replicas become that of a step.
        origin: what another process loads to have the same, if anything.
        precision: in which it is to be trained; the module's own if None.
        record: how the values of a hollow module come about; None: it has them.
        weights: files that a hollow module's values are read from instead.
        grad: the grad mode that a forward which asks for it is told.
    """

    model: nn.Module
    example: Any
    optimizer: Optimizer = adamw
    batch_dims: BatchDims | None = None
    path: Path | None = None
    data: Data | None = None
    eval_data: Data | None = None
    reduction: Reduction = field(default_factory=Reduction)
    origin: str = ""
    precision: Precision | None = None
    record: Record | None = None
    weights: str | None = None
    grad: bool = True

    @property
    def place(self) -> str:
        """For errors: the model file, or the module's class."""
        return (self.origin or type(self.model).__name__) if self.path is None else str(self.path)

    @property
    def mixed(self) -> Mixed | None:
        """What ranks need to know of its precision."""
        return None if self.precision is None else self.precision.mixed(self.model)


def load_model_file(path: str | Path, *, hollow: int | None = None) -> Subject:
    """Run a model file, or read what `hf:...` names, and make its module and example.

    Args:
        hollow: a seed under which the module is made, without its values where that can be. Its parameters are not to
            be looked at then.
    """
    if str(path).startswith(PREFIX):
        return Subject(**vars(load_hugging_face(str(path), hollow=hollow is not None)))
    path = Path(path)
    if not path.is_file():
        near = did_you_mean(path.name, sorted(one.name for one in path.parent.glob("*.py")))
        raise ModelFileError(
            f"no model file {str(path)!r}", remedy=f"{near}give the path of a Python file with model() and example()"
        )
    if path.suffix != ".py":
        raise ModelFileError(f"{str(path)!r} is not a Python file", remedy="give a file whose name ends in .py")
    with _imported(path) as module:
        make_model, make_example = (_function(module, path, name) for name in ("model", "example"))
        with inside(path, "model()"):
            start = Start(make_model()) if hollow is None else begin(make_model, hollow)
        model = start.module
        with inside(path, "example()"), _seeded(None if hollow is None or start.record is None else hollow + 1):
            example = make_example()
        batch_dims, precision = (_called(module, path, name) for name in ("batch_dims", "precision"))
        optimizer = _optimizer(module, path)
        data, eval_data = (
            _function(module, path, name) if hasattr(module, name) else None for name in ("data", "eval_data")
        )
        reduction = _reduction(module, path)
    _check_kinds(path, model, example, batch_dims)
    return Subject(
        model=model,
        example=example,
        optimizer=optimizer,
        batch_dims=batch_dims,
        path=path,
        data=data,
        eval_data=eval_data,
        reduction=reduction,
        origin=str(path.resolve()),
        precision=chosen_precision(precision, model, error=ModelFileError, place=f"{path}, precision()"),
        record=start.record,
    )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Random numbers of a seed, if one is given: what a hollow module would have drawn was not drawn."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _reduction(module: ModuleType, path: Path) -> Reduction:
    """`reduction` of the file: a word, or a function that weighs a micro-batch."""
    try:
        return Reduction(vars(module).get("reduction", "mean"))
    except BadReduction as error:
        raise ModelFileError(
            str(error), place=str(path), remedy='reduction = "mean", "sum", or a function that weighs a micro-batch'
        ) from None


def load_optimizer(path: Path) -> Optimizer:
    """The optimizer of a model file, without making its model."""
    with _imported(path) as module:
        return _optimizer(module, path)


def _optimizer(module: ModuleType, path: Path) -> Optimizer:
    return as_one(_function(module, path, "optimizer")) if hasattr(module, "optimizer") else adamw


def _check_kinds(path: Path, model: Any, example: Any, batch_dims: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelFileError(
            f"model() returned {_a(model)}, not an nn.Module", place=str(path), remedy="return the module itself"
        )
    if not isinstance(example, tuple | dict | Tensor):
        raise ModelFileError(
            f"example() returned {_a(example)}",
            place=str(path),
            remedy="return a tuple of arguments, a dict of keyword arguments, or one tensor",
        )
    if not isinstance(batch_dims, dict | tuple | list | None):
        raise ModelFileError(
            f"batch_dims() returned {_a(batch_dims)}",
            place=str(path),
            remedy="return the batch dim of each input, as a list in order or a dict by name",
        )


def check_loss(output: Any, place: str) -> Tensor:
    """The scalar loss of a forward: its `.loss`, its `["loss"]`, or the only scalar that it returns."""
    loss = find_loss(output)
    if loss is not None and loss.requires_grad:
        return loss
    shape = f" of shape {list(output.shape)}" if isinstance(output, Tensor) else ""
    raise ModelFileError(
        f"the forward gives no loss to train: it returned {_a(output)}{shape}"
        + (" whose loss depends on no trained parameter" if loss is not None else ""),
        place=place,
        remedy="return a scalar loss that depends on a trained parameter, or a dict or model output that has one",
    )


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    found = vars(module).get(name)
    if found is None:
        raise ModelFileError(f"{path} has no {name}()", remedy=f"define {name}() there")
    if not callable(found):
        raise ModelFileError(f"{name} in {path} is {_a(found)}, not a function", remedy=f"define {name}() there")
    return found  # type: ignore[no-any-return]


def _called(module: ModuleType, path: Path, name: str) -> Any:
    """What a function of the file gives; None if the file has none of that name."""
    if not hasattr(module, name):
        return None
    with inside(path, f"{name}()"):
        return _function(module, path, name)()


@contextmanager
def _imported(path: Path) -> Iterator[ModuleType]:
    """The file as a module, findable under its name while it is in use."""
    with inside(path, "the file"):
        before = loaded(str(path))
    if before is not None:
        yield before
        return
    with as_module(f"weft_model_file_{path.stem}", str(path)) as (module, run):
        with inside(path, "the file"):
            run()
        keep(str(path), module)
        yield module


@contextmanager
def inside(
    path: Path | None,
    what: str,
    *,
    only: tuple[type[BaseException], ...] = (Exception, SystemExit),
    remedy: str = "run the file by itself, or add --debug for the whole trace",
) -> Iterator[None]:
    """Turns whatever the code of a model file raises, `sys.exit()` too, into a ModelFileError with its own line.

    A module given in Python (`path` None) raises its own errors to its own caller.

    Args:
        only: what is turned; everything else passes.
        remedy: what may have gone wrong, if it is known.
    """
    try:
        yield
    except only as error:
        if path is None or isinstance(error, WeftError):
            raise
        left = isinstance(error, SystemExit)
        told = f"called sys.exit({error})" if left else f"raised {type(error).__name__}: {error}"
        raise ModelFileError(f"{what} {told}", place=_place(error, path), remedy=LEFT if left else remedy) from error


def _place(error: BaseException, path: Path) -> str:
    """The innermost line of the user's file on the way to the error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    wanted = str(path.resolve())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{path}:{frame.lineno}  {frame.line}" for frame in frames if str(Path(frame.filename).resolve()) == wanted
    ]
    return lines[-1] if lines else str(path)
