"""Running torch.export over a module, and what it would lose or cannot hold."""
