"""Who is in the swarm? SWIM with Lifeguard: cores that do no I/O and read no clock."""
