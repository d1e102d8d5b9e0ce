"""Answers to the users of the HTTP port as typed rows, which the API writes as JSON, and pages as HTML."""
