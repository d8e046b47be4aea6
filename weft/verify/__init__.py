"""The same numbers? The eager original against a Program on emulated devices, in float64."""

from weft.verify.api import verify
from weft.verify.compare import Difference, FirstDifference, Result
from weft.verify.program_dir import verify_program

__all__ = ["Difference", "FirstDifference", "Result", "verify", "verify_program"]
