"""Who collects the batch of a step: the training loop in turn with training, or a thread ahead of it."""
