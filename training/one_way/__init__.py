"""Links on which one end pushes and the other merges."""
