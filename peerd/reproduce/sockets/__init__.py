"""Processes of one machine that sum over real connections: the lines between them, and what each of them runs."""
