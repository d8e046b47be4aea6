"""Errors for users: what is wrong, where in their own code, and what to do about it.

Every error that a user can cause derives from `WeftError`. It prints as three short lines: the fact with the
offending value, the place (the user's source line, a plan line, a file), and the remedy. Internal faults are
plain `assert`s: they are ours, not the user's.
"""

from __future__ import annotations


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
