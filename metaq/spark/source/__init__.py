"""The data source and sink ``metaq`` of Spark."""
