"""The text protocol: its sessions, and a module a family of commands."""
