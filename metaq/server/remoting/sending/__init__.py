"""Requests of producers."""
