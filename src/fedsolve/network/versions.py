"""The versions that two ends of a federation must agree on."""

from __future__ import annotations

import platform
from importlib import metadata

from fedsolve.version import __version__

PACKAGES = ("flwr", "numpy", "protobuf")


def versions() -> dict[str, str | None]:
    """Versions by name; None for a package that is not installed."""
    by_name: dict[str, str | None] = {"fedsolve": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_name[name] = None
    return by_name
