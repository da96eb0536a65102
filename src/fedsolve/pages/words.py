"""Numbers and lists in words, for pages and the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST = 2000
"""The longest remark in characters, so that nobody can flood a terminal."""

_SIGNS = re.compile(" ([±=<]) ")


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 block", "2 blocks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(words: Sequence[str], most: int | None = None) -> str:
    """The words as part of a sentence; beyond `most` only how many more there are."""
    if most is not None and len(words) > most + 1:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    if seconds < 5400:
        return f"{seconds // 60} min {seconds % 60:02d} s" if seconds < 600 else f"{seconds // 60} min"
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def size(nbytes: float) -> str:
    """Bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def short(text: str, most: int) -> str:
    """The text, cut to at most `most` letters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def unbroken(text: str) -> str:
    """The text with numbers and their signs kept on one line."""
    return _SIGNS.sub("\u00a0\\1\u00a0", text).replace(" %", "\u00a0%")


def megabytes(nbytes: float) -> str:
    """Megabytes (10^6 bytes) with three significant digits."""
    value = nbytes / 1e6
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f}"


def traffic_words(told: Mapping[str, Any]) -> str:
    return f"{megabytes(told['bytes_up'])} MB up, {megabytes(told['bytes_down'])} MB down"


def known(value: Any, form: str | Callable[[Any], str] = "{}") -> str:
    """The value in this form, such as ", {:.2f} left"; nothing where there is no value."""
    if value is None:
        return ""
    return form.format(value) if isinstance(form, str) else form(value)


def one_line(text: str) -> str:
    return " ".join(text.split())


def harmless(text: str) -> str:
    """The text in one line, shortened, and without characters that control a terminal."""
    shown = "".join(" " if c.isspace() else c if c.isprintable() else "\ufffd" for c in text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"
