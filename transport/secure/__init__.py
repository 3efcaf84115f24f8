"""How a connection is sealed, and how each end knows who the other is."""
