"""Clients of a broker: plain sockets and threads, no event loop; they work in programs that gevent patched, too."""

from metaq.client.textclient import Batch, PutManyFailed, TextClient, parse_stats

__all__ = ["Batch", "PutManyFailed", "TextClient", "parse_stats"]
