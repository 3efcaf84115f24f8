"""A PyTorch model as one flat vector with names."""
