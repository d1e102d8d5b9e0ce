"""How Spark finds the format ``metaq`` by itself: it imports every installed module named pyspark_… and asks for this class."""

from metaq.spark.source import MetaqDataSource as DefaultSource

__all__ = ["DefaultSource"]
