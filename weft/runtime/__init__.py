"""What runs: transports, the base of generated programs, random streams, algorithms. Imports torch and the standard
library only."""
