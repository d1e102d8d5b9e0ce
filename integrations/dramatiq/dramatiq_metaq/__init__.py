"""metaq as the broker of dramatiq.

::

    import dramatiq
    from dramatiq_metaq import MetaqBroker

    dramatiq.set_broker(MetaqBroker("127.0.0.1:9876"))
"""

from dramatiq_metaq.broker import MetaqBroker

__all__ = ["MetaqBroker"]
