"""The store: one commit log per broker, and what is derived from it. Blocks honestly; one writer."""
