"""The text protocol: its sessions, and one module per family of commands."""
