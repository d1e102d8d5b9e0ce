"""Who asks, and who may do what."""
