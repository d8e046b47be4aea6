"""The base of generated programs, and how they are loaded."""
