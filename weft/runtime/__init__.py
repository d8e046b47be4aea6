"""What runs: transports, the interpreter of scripts, random streams, algorithms. Imports torch and the standard
library only."""
