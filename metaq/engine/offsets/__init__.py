"""How far groups are: kept in the log, recorded, exported."""
