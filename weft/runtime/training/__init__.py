"""What a user trains: the pieces of a rank, their events, micro-batches, one optimizer step."""
