"""Methods that experiments compare peerd with, and nothing to train with: each lacks what its experiment is about."""
