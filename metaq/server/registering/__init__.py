"""The registration of a broker, with registries and in ZooKeeper."""
