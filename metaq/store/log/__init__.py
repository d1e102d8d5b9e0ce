"""The commit log and its retention."""
