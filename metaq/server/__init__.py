"""The broker process: sessions, handlers, timers. Runs on gevent."""
