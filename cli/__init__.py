"""The command line: one file a verb, each a thin client of a daemon's control socket."""
