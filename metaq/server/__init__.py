"""The broker process: sessions, handlers and timers, on gevent."""
