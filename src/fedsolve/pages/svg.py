"""Figures as part of a page: no identifiers that could clash, no addresses, colours the page decides."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from fedsolve.pages.plots import COLORS, render
from fedsolve.pages.templates import markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = re.compile("|".join(COLORS))
_ROOT = re.compile(r'<svg [^>]*?width="([\d.]+)pt"[^>]*?viewBox="([^"]*)"[^>]*>')
_NUMBERS = re.compile(r' (d|x|y|transform)="([^"]*)"')
_FAMILY = re.compile(r"\s*font-family:[^;\"]*;?")
# Before matplotlib 3.11 size, weight and family stand in one property.
_FONT = re.compile(r"font:\s*(?:(?P<weight>700|bold)\s+)?(?P<size>[\d.]+)px[^;\"]*;?")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element that a screen reader reads as `description`.

    name: begins every identifier in the drawing, so no other figure of the page may have it.
    """
    text = render(figure, "svg", transparent=True).decode()
    root = _ROOT.search(text)
    assert root is not None
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[root.end() :], flags=re.S)
    # Only identifiers that something refers to are kept, under names of this figure.
    used = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'xlink:href="#([^"]+)"', text)}
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = text.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    text = _NUMBERS.sub(lambda m: f' {m[1]}="{_short(m[2])}"', text)
    text = re.sub(r' style="([^"]*)"', lambda m: f' style="{_styled(m[1])}"', text)
    # The view box keeps the proportions; the page decides the size.
    opening = (
        f'<svg viewBox="{root[2]}" role="img" aria-label="{escape(description)}" '
        f'style="max-width: {float(root[1]) * 4 / 3:.0f}px">'
    )
    return markup(opening + re.sub(r">\s+<", "><", text).strip())


def _short(numbers: str) -> str:
    """Coordinates to a hundredth of a point, and no more space than they need."""
    short = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return " ".join(short.split())


def _styled(style: str) -> str:
    """The style with the page's colours and the page's font."""

    def sized(font: re.Match[str]) -> str:
        return f"{'font-weight: bold; ' if font['weight'] else ''}font-size: {font['size']}px;"

    plain = _FAMILY.sub("", _FONT.sub(sized, style))
    return _COLORS.sub(lambda match: f"var(--{COLORS[match[0]]})", plain).strip()
