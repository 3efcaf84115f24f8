"""Links of two that both hold the same pair of references."""
