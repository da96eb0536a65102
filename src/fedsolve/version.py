"""The version of this fedsolve, which peers of a federation compare."""

__version__ = "0.1.0"
