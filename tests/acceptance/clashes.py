"""Models whose parts are called what the runtime, Python or the generated text calls something of its own.

In: a form and names. Out: a module that has a part of that form under each of the names, and a loss. Names are
collected from the runtime's classes, from modules that run and from the text of a program: what is added there is tried
too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import pkgutil
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import weft
import weft.runtime
from weft.compile import compile_program

WIDTH, ROWS, LAYERS = 2, 4, 3
FORMS = ("module", "parameter", "buffer", "list", "holds a list", "nested", "in layers")
ODD = ("0", "1", "007", "1st", "x1", "a-b", "a b", "naïve", "_", "__", "__private", "_Top__private", "__dunder__")
"""Names that no attribute of a class has: with digits, of other letters, ones that Python mangles in a class."""
USUAL = ("F", "nn", "dist", "weft", "rank", "args", "kwargs", "loss", "grad", "data", "shape", "weight", "bias")
"""Names that a generated text or a tensor may have for something."""


def example() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Layer(nn.Module):
    """Two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.rand(2 * WIDTH, WIDTH, dtype=torch.float64))
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.tanh(x @ self.up) @ self.down) * self.scale


class Listed(nn.Module):
    """Holds layers in a list, which generated code runs in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Holder(nn.Module):
    """Parts of a form under the names given, applied in turn. A list applies its layers."""

    def __init__(self, form: str, names: tuple[str, ...]) -> None:
        super().__init__()
        self.clash_names = names
        for name in names:
            match form:
                case "module":
                    self.add_module(name, Layer())
                case "parameter":
                    self.register_parameter(name, nn.Parameter(torch.rand(WIDTH, dtype=torch.float64)))
                case "buffer":
                    self.register_buffer(name, torch.rand(WIDTH, dtype=torch.float64))
                case "list":
                    self.add_module(name, nn.ModuleList(Layer() for _ in range(LAYERS)))
                case "holds a list":
                    self.add_module(name, Listed())
                case "nested":
                    self.add_module(name, Holder("parameter", (name,)))
                case _:
                    raise AssertionError(form)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.clash_names:
            part = getattr(self, name)
            if isinstance(part, nn.Parameter):
                x = torch.tanh(x * part)
            elif isinstance(part, Tensor):
                part.mul_(0.5)
                x = x + part
            else:
                for one in part if isinstance(part, nn.ModuleList) else (part,):
                    x = one(x)
        return x


class InLayers(nn.Module):
    """A loss of layers in a list, each of which has parameters under the names given."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Holder("parameter", names) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Top(Holder):
    """A loss of parts that stand at the top of the model, where the attributes of the runtime are."""

    def __init__(self, form: str, names: tuple[str, ...]) -> None:
        super().__init__(form, names)
        self.clash_weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.clash_weight).square().mean()


def clashing(form: str, names: tuple[str, ...]) -> nn.Module:
    """A model with a part under each of the names.

    Args:
        form: a "module", "parameter" or "buffer"; a "list" of layers, or a module that "holds a list"; "nested": a
            parameter in a module of the same name; "in layers": a parameter of each layer of a list.
    """
    torch.manual_seed(0)
    return InLayers(names) if form == "in layers" else Top(form, names)


def names() -> list[str]:
    """All names that something else has as well and a module may have."""
    found = {*ODD, *USUAL, *keyword.kwlist, *keyword.softkwlist, *_of_classes(), *_of_modules(), *_of_text()}
    found |= {name for name in dir(builtins) if name.islower()}
    return sorted(name for name in found if is_free(name))


def is_free(name: str) -> bool:
    """torch takes a submodule of this name, copies the model, and the models above have nothing else under it."""
    taken = name.startswith("clash_") or name == "__deepcopy__" or hasattr(nn.Module(), name)
    return bool(name) and "." not in name and not taken


def _of_classes() -> Iterator[str]:
    """Attributes of the runtime's modules, and of what they hold."""
    for found in pkgutil.walk_packages(weft.runtime.__path__, "weft.runtime."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith("weft."):
                yield from dir(value)
                yield from getattr(value, "__annotations__", ())


def _of_modules() -> Iterator[str]:
    """Attributes that modules at work have, whole and in pieces."""
    for plan in ("dp=1", "pp=1,microbatches=2"):
        module = weft.parallelize(clashing("list", ("h",)), example(), plan, emulate=True, cache=None)
        ranks = getattr(module, "ranks", [module])
        for held in (module, *ranks, *(one for rank in ranks for one in rank.modules())):
            yield from vars(held)


def _of_text() -> Iterator[str]:
    """Every name in the texts of programs: what they import, their tables, arguments and values."""
    for plan in ("tp=2", "dp=2,zero=3", "pp=2"):
        files = compile_program(clashing("list", ("h",)), example(), plan).files
        for name, text in files.items():
            if name.endswith(".py"):
                for node in ast.walk(ast.parse(text)):
                    match node:
                        case ast.Name(id=found) | ast.arg(arg=found) | ast.Attribute(attr=found):
                            yield found
                        case ast.FunctionDef(name=found) | ast.ClassDef(name=found) | ast.alias(name=found):
                            yield found
