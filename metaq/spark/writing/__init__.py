"""Writing topics with Spark."""
