"""What of the data folder is no log: the disk itself, open files, small documents."""
