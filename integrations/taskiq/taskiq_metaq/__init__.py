"""metaq as the broker of taskiq.

::

    from taskiq_metaq import MetaqBroker

    broker = MetaqBroker("127.0.0.1:9876")
"""

from taskiq_metaq.broker import MetaqBroker
from taskiq_metaq.schedules import MetaqScheduleSource

__all__ = ["MetaqBroker", "MetaqScheduleSource"]
