"""The commands behind `weft`, one file each. The command line itself, with its errors and exit codes, is `cli.py`."""
