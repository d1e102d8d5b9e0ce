"""Topics as tables of Apache Spark: a data source, and what reads and writes for it.

Spark runs in processes of its own, never in a broker's, and nothing here brings gevent to it.
"""

from metaq.spark.session import session

__all__ = ["session"]
