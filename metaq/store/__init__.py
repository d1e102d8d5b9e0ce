"""The store: one commit log per broker, and the files derived from it. One writer; calls may block on the disk."""
