"""One program for all sizes of marked dims: programs at several sizes, generalised to expressions."""
