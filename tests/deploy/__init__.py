"""The fabric tasks, over real SSH."""
