"""Arithmetic on whole models, once through memory: compiled, or by numpy where there was no compiler."""
