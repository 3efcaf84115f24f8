"""What any process of peerd needs of its host: logs, memory, niceness, and an end in good order."""
