"""HTML from values: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

_SIGNS = re.compile(" ([±=<]) ")
_VOID = frozenset({"meta", "col", "br", "hr", "link"})


class Markup(str):
    """Text that is HTML already. Only the functions here make it."""

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


@cache
def palette() -> str:
    """The colours and letters of all pages, light and dark, as CSS."""
    return resources.files("fedsolve").joinpath("palette.css").read_text(encoding="utf-8")


def page_head(title: str, style: str, *more: Markup) -> Markup:
    """The head of a page that needs no other file; `style` comes after the palette."""
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="fedsolve"),
        *more,
        tag("title", title),
        tag("style", trusted(f"{palette()}\n{style}")),
    )


def unbroken(text: str) -> str:
    """The text with numbers and their signs kept on one line."""
    return _SIGNS.sub("\u00a0\\1\u00a0", text).replace(" %", "\u00a0%")
