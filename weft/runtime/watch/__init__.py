"""What each process of a job is doing, told to the others."""
