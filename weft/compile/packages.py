"""Packages that only some models or files need: used if they are installed, named if they are not.

In: a module's name and who needs it. Out: the module, or an error of ours with what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import WeftError


def needed(module: str, what: str, *, error: type[WeftError], install: str | None = None) -> Any:
    """A module that is needed to read something.

    Args:
        install: what pip is to install, if that is not the module's package.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise error(
            f"{what} cannot be read: {package} is not installed", remedy=f"pip install {install or package}"
        ) from None
