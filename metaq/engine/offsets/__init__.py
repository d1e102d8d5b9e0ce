"""How far groups are: known, kept in the log, recorded, exported."""
