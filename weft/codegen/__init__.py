"""Program -> readable PyTorch: `generate` gives the files that `weft.runtime.program.load.load_program` runs."""

from weft.codegen.pipeline import generate

__all__ = ["generate"]
