"""The key index: messages by key."""
