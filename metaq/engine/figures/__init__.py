"""What is counted: since the start, over time, and as metrics."""
