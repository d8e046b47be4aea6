"""Parts of tensors: cuts along axes, moves, transfers, differentiable reshards."""
