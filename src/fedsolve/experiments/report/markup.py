"""HTML from values: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

_SIGNS = re.compile(" ([±=<]) ")
_VOID = frozenset({"meta", "col", "br", "hr"})


class Markup(str):
    """Text that is HTML already. Only `tag`, `join` and `trusted` make it."""

    __slots__ = ()


def trusted(text: str) -> Markup:
    """Our own HTML, style or script, taken as it is."""
    return Markup(text)


def escaped(value: Any) -> Markup:
    """The value as HTML text; markup stays what it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def join(parts: Iterable[Any], between: str = "") -> Markup:
    """The parts one after the other, escaped where need be."""
    return Markup(escaped(between).join(escaped(part) for part in parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element with its attributes, `class_` and `aria_label` for class and aria-label.

    None and False leave an attribute out, True gives it without a value.
    """
    words = [name]
    for attribute, value in attributes.items():
        spelled = attribute.removesuffix("_").replace("_", "-")
        if value is True:
            words.append(spelled)
        elif value is not None and value is not False:
            words.append(f'{spelled}="{escaped(str(value))}"')
    opened = f"<{' '.join(words)}>"
    if name in _VOID:
        return Markup(opened)
    return Markup(f"{opened}{join(children)}</{name}>")


def unbroken(text: str) -> str:
    """The text with numbers and their signs kept on one line."""
    return _SIGNS.sub("\u00a0\\1\u00a0", text).replace(" %", "\u00a0%")
