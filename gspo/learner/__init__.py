"""Training on scored groups: batch plan, packing, forward pass, optimizer, routing replay, checkpoints."""
