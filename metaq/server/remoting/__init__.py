"""The remoting protocol: its sessions, admission, and one module per family of requests."""
