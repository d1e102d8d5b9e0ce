"""The text protocol of MetaQ's clients, and of people with telnet."""
