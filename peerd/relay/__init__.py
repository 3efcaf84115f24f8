"""For nodes that nobody can dial: a member lends them ports at which they are reached."""
