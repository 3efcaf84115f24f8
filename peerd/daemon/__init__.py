"""The process that outlives the trainer: membership, links, and the mode around its copy of the model."""
