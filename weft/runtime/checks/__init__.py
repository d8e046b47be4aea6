"""What refuses wrong numbers: optimizers, batches, changed parameters; and ledgers of memory."""
