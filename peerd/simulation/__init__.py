"""A whole swarm in one process, on virtual time: the production cores behind a second, thin shell.

`world` is the clock and the heap of events, `network` what a message goes through, `connections` what production's
connections do, `node` the shell around one node's cores, `problems` what is trained, `checkers` the invariants that are
watched during every run, `faults` what goes wrong, `swarm` all of it together, `scenario` one run from its settings to
its result, `report` what is shown afterwards.
"""
