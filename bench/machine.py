"""Where and with what something was measured: written into every result."""

from __future__ import annotations

import os
import platform
import time

import torch

import weft


def machine(**more: object) -> dict[str, object]:
    """The machine, versions, the day, and how busy the machine was."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft.__version__,
        "date": time.strftime("%Y-%m-%d"),
        **more,
    }
