"""Messages between peers: what they are in bytes, and what carries them. Start reading at `connection`."""
