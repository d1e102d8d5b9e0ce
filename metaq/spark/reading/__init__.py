"""Reading topics with Spark: from brokers, or straight from a store folder."""
