"""The broker's figures: counters since the start, statistics over time, and metrics.

*Counters* only grow, from the start of the process. *Statistics* are the messages and bytes of each topic and group, sampled
over a minute, an hour and a day, for clients that ask for rates. *Metrics* are what ``/metrics`` exports: their values are read
from counters, statistics and the broker's parts when Prometheus asks.
"""
