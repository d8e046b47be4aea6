"""The public names: all there, resolved late, rooms callable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[2]


@pytest.mark.smoke
def test_every_public_name_resolves() -> None:
    assert all(getattr(weft, name) is not None for name in weft.__all__)
    assert set(dir(weft)) == set(weft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weft.nonsense


def test_plans_can_be_kept_and_no_single_letters_are_scattered() -> None:
    assert {"save_plan", "load_plan", "match"} <= set(weft.__all__)
    assert not {"f", "b", "w"} & set(weft.__all__) and callable(weft.f) and callable(weft.b) and callable(weft.w)


def test_rooms_are_functions_too_however_they_were_imported() -> None:
    """A sub-module import makes `weft.verify` an attribute of the package before anybody asked for it."""
    code = (
        "from weft.verify.compare import Result; import weft;"
        "print(callable(weft.verify), callable(weft.capture), weft.verify.verify.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["True", "True", "verify"], done.stderr


def test_importing_weft_loads_nothing_heavy() -> None:
    code = "import sys, weft; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
