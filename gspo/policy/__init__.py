"""Stages 8 and 9: the model that learns, its log-probabilities, the optimiser, and what is saved of them."""
