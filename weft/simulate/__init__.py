"""What a step will take, found without running it."""
