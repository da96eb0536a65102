"""Seeing a run while it goes on: a board that follows it, a page on loopback, metrics, a file.

board         what is known of a run at this moment; follows it (`federation.followers`), keeps records
              (kept_records) and tells them as a document (status_document)
phrases       the same in words, for page and terminal
exposition    the same as metrics in Prometheus' text form
status_page   the same as one HTML page; curves, status.css, status.js
loopback      serves page, metrics and JSON to this machine alone
"""

from __future__ import annotations
