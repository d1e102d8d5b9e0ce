"""Writing topics with Spark, in batches and from streaming queries."""
