"""Weights and gradients: unshard, prefetch, buckets, reductions, masters."""
