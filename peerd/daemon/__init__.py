"""The process that outlives the trainer: membership, connections, and the mode around its copy of the model."""
