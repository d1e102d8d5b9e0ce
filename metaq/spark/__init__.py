"""Topics as tables of Apache Spark: a data source, a session, and the offset report.

Spark runs in processes of its own, never in a broker's, and this package does not bring gevent into them.
"""

from metaq.spark.session import session

__all__ = ["session"]
