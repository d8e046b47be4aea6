"""Clusters: which devices there are, what connects them, and what a collective costs on it."""
