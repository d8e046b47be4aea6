"""What a parallel module shows of the original: its attributes, and its submodules."""
