"""Together: what rank 0 compiles, on every rank, or its refusal.

In: the job of this process, and a function that makes the files of a program. Out: the files that it gives on rank 0. A
mistake of the user's that it finds is raised on every rank alike, so that a script that tries plans goes on on all of
them; it travels as JSON beside the files. Any other failure ends the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from weft import errors
from weft.compile.programs import Content
from weft.errors import WeftError
from weft.runtime.jobs.connect import Job
from weft.runtime.links.transport import Stopped

MISTAKE = "mistake.json"


def shared(job: Job, make: Callable[[], Content]) -> Content:
    """What `make` gives on rank 0, or the error that it raises there, on every rank."""
    mistakes: list[WeftError] = []

    def tried() -> Content:
        try:
            return make()
        except WeftError as error:
            mistakes.append(error)
            return {MISTAKE: written(error)}

    found = job.share(tried)
    if mistakes:
        raise mistakes[0]
    if MISTAKE in found:
        # where nobody catches it rank 0 says all there is to say
        raise read(found[MISTAKE]) from Stopped()
    return found


def written(error: WeftError) -> bytes:
    """An error as it travels. Of one that is not told to users by its own name, the kind that it is of."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    told = {"kind": kind.__name__, "message": error.message, "place": error.place, "remedy": error.remedy}
    return json.dumps(told).encode()


def read(text: bytes) -> WeftError:
    """The error that was written."""
    told = json.loads(text)
    kinds: list[type[WeftError]] = [WeftError, *WeftError.__subclasses__()]
    kind = next(kind for kind in kinds if (kind.__module__, kind.__name__) == (errors.__name__, told["kind"]))
    return kind(told["message"], place=told["place"], remedy=told["remedy"])
