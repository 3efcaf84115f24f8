"""The trainer's side: `peerd.attach`, the session with the daemon, checkpoints."""
