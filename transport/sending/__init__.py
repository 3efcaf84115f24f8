"""What leaves a node, and in which order."""
