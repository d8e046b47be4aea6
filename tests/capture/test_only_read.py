"""What forward only reads: deep in objects and in modules of Python's, which is no change; files, which are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import CaptureError


class Nested(nn.Module):
    """Reads what is held deep in objects, and in a module of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ops = nn.Linear(4, 4), nn.functional
        self.config = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace(w=2.0)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.mse_loss(self.layer(x), x) * self.config.a.b.c.d.w


def test_what_is_only_read_is_no_change() -> None:
    module, x = Nested().double(), torch.randn(4, 4, dtype=torch.float64)
    parallel = weft.parallelize(module, (x,), plan="dp=2", emulate=True, cache=None)
    assert torch.allclose(parallel(x), module(x), atol=1e-12)


class AsksForFiles(nn.Module):
    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() * (2.0 if self.ask() else 1.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: open(__file__).read(1),  # noqa: PTH123, SIM115 - as users write it
        lambda: os.path.exists("x"),  # noqa: PTH110
        lambda: Path("x").exists(),
    ],
)
def test_files_are_read_outside_forward(ask: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="forward asks for a file"):
        weft.capture(AsksForFiles(ask), torch.ones(2, 4))


class Finder(MetaPathFinder):
    """Looks for a file whenever something is imported, as pytest's does and that of type checkers at run time."""

    def __init__(self) -> None:
        self.asked = set[str]()

    def find_spec(self, fullname: str, *_: Any) -> None:
        self.asked.add(fullname)
        assert not os.path.exists(fullname)  # noqa: PTH110


class Imports(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        sys.modules.pop("this", None)
        import this  # noqa: F401

        return super().forward(x).mean()


def test_imports_may_look_for_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    weft.capture(Imports(4, 4), torch.ones(2, 4))
    assert "this" in finder.asked
    assert "Beautiful" in capsys.readouterr().out
