"""The remoting protocol: its sessions, who may ask what, and a module a family of requests."""
