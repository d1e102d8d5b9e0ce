"""Access to the data folder below log, queues and index: the disk, open files, small documents."""
