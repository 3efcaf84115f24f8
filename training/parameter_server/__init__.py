"""Shards of the parameters that members serve, and the trees before them."""
