"""Program -> readable PyTorch: `emit` writes a directory that `weft.runtime.program.load.load_program` runs."""

from weft.codegen.emit import Emitted, emit, generate

__all__ = ["Emitted", "emit", "generate"]
