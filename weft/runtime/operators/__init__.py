"""Operators that need more than a local call on each part: the functions that rules name."""
