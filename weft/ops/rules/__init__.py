"""The rules of weft's own, a file for each family of operators; each has a table `RULES`."""
