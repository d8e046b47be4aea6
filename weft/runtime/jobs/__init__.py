"""Processes: launched, connected, put to work."""
