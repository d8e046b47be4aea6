"""Errors for users: what is wrong, where in their own code, and what to do about it.

Every error that a user can cause derives from `WeftError`. It prints as three short lines: the fact with the
offending value, the place (the user's source line, a plan line, a file), and the remedy. Internal faults are
plain `assert`s: they are ours, not the user's. `did_you_mean` finds what a misspelt word was to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Refuse = Callable[[str, str], Exception]
"""From what is wrong and what to do instead to an error."""


class WeftError(Exception):
    """A mistake in the input, told with value, place and remedy.

    Args:
        message: what is wrong, naming the value.
        place: where, in the user's own terms (`model.py:12`, an op's name, a plan line).
        remedy: what to change.
    """

    exit_code = 2

    def __init__(self, message: str, *, place: str = "", remedy: str = "") -> None:
        self.message, self.place, self.remedy = message, place, remedy
        lines = [message]
        if place:
            lines.append(f"  at: {place}")
        if remedy:
            lines.append(f"  try: {remedy}")
        super().__init__("\n".join(lines))


class CaptureError(WeftError):
    """The model cannot be captured faithfully."""


class RuleError(WeftError):
    """An operator's rule is malformed, missing, or does not fit the operator's arguments."""


class PlanError(WeftError):
    """A plan asks for something that cannot be done, or contradicts itself."""


class LayoutError(WeftError):
    """A layout is malformed: parts that overlap, leave holes or lie outside their tensor."""


class CheckError(WeftError):
    """A Program failed its static check. The message shows the neighbourhood of the fault."""


class ModelFileError(WeftError):
    """A model file is missing or lacks what Weft needs from it."""


class RunError(WeftError):
    """A rank failed while a Program ran; the others were stopped."""


class UsageError(WeftError):
    """A command line that is not understood."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'dp'? `, or nothing if no known word is near.

    >>> did_you_mean("pd", ["tp", "pp", "dp"]), did_you_mean("cosin", ["linear", "cosine"]), did_you_mean("x", ["dp"])
    ("did you mean 'dp'? ", "did you mean 'cosine'? ", '')
    """
    far = {one: _distance(word, one) for one in known}
    near = min(far, key=lambda one: far[one], default="")
    return f"did you mean {near!r}? " if near and far[near] <= max(1, (len(word) + 1) // 3) < len(near) else ""


def _distance(a: str, b: str) -> float:
    """Letters to insert, drop or replace; two that changed places count half, which people mistype most."""
    rows: list[list[float]] = [list(map(float, range(len(b) + 1)))]
    for i, letter in enumerate(a, 1):
        row = [float(i)]
        for j, other in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, a[i - 2]) == (b[j - 2], other) and letter != other:
                best = min(best, rows[-2][j - 2] + 0.5)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
