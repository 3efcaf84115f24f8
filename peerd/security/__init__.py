"""Who belongs to a swarm: authorities, certificates, tokens, and how a newcomer turns one into the other."""
