"""What daemons, and a daemon and its trainer, agree on beside the messages of modes and membership."""
