"""The table of candidates that a choice was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedsolve.cli.output import percent, table

_TOLD = ("scale", "gain", "ridge", "residual_ridge", "width", "bandwidth", "landmarks")


def tried_table(tried: Sequence[Mapping[str, Any]]) -> Table:
    """Candidates with their marks on the rows held out; an arrow at the one that was taken."""
    rows = [
        (
            "->" if one["chosen"] else "",
            one["method"],
            settings_text(one["settings"]),
            "" if one["layers"] is None else str(one["layers"]),
            "" if one["errors"] is None else percent(1.0 - one["errors"]),
            "" if one["loss"] is None else f"{one['loss']:.4f}",
            one["left_out"],
        )
        for one in tried
    ]
    heads = ("", "tried", "settings", "layers", "held out", "squared error", "")
    return table(heads, rows, left=(0, 1, 2, 6))


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of a candidate that tell it from others."""
    told = [f"{name.replace('_', ' ')} {settings[name]}" for name in _TOLD if name in settings]
    return ", ".join(told)
