"""What processes of one host share: pipes, segments of memory, a mailbox, and collectives on memory that all see."""
