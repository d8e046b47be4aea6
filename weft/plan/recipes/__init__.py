"""Recipes: functions that write a plan with the public primitives and nothing else."""
