"""Memory of a rank: expected, measured, limited."""
