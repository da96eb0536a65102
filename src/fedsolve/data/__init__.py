"""Data in: tables, partitions."""
