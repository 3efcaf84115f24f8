"""How members agree that a round of an all-reduce took place, and sum in it."""
