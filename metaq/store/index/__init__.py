"""The key index: finding messages by key."""
