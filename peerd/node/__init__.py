"""What a node decides, without I/O and without a clock."""
