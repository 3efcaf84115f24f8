"""What the two processes of a node share: a socket, a memory file, files on the disk."""
