"""The static proof of a Program: layouts are its types."""
