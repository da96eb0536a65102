"""The tables that hospitals publish, from sums: describe, regression, survival, mixed models.

Every result is that of the pooled rows. A client answers with sums over its rows; no row leaves it.
"""
