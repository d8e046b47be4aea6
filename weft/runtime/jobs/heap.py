"""Heap: how the C library keeps memory that tensors have left.

In: nothing. Out: nothing; from then on large tensors get memory of their own from the system and give it back. By
default glibc moves its limit up to the largest tensor that was ever freed, lays the next ones end to end with small
ones that stay, and the heap grows from step to step though no more is alive. Other C libraries are left as they are.

Memory that comes anew in every step is mapped page by page, which takes longer than to write it; so torch is told to
ask for huge pages too. It hears that until the first tensor is made: in workers, which begin here. Whoever starts
processes of their own can set the variable for them.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM, MMAP = -1, -3
"""Numbers of `mallopt`: what may be free at the end of the heap; from which size on memory is not of the heap."""
LIMITS = {TRIM: 16 << 20, MMAP: 1 << 20}
"""Bytes. Below, the pages that every step asks for anew cost more time than they save memory."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Where torch reads whether to ask for huge pages, for tensors of 2 MiB and more."""


def give_memory_back() -> bool:
    """Let this process give memory back; False where that cannot be asked for."""
    if platform.libc_ver()[0] != "glibc":
        return False
    os.environ.setdefault(HUGE_PAGES, "1")
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, limit) == 1 for number, limit in LIMITS.items())
