"""Watching a run: a board that follows it, a page on loopback, metrics, a file.

board      the state of a run at this moment, by following it (`federation.engine`), as a document
phrases    the document read again, and in words, for page and terminal
loopback   the same as one HTML page, as Prometheus' metrics and JSON, served to this machine alone
"""
