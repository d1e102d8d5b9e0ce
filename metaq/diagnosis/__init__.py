"""Diagnosis of consumer groups: pure functions of facts, which the command line asks for and a broker knows itself."""
