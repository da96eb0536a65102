"""Figures as part of a page: no identifiers that could clash, no addresses, colours the page decides."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from fedsolve.experiments.figures.style import INK, RULE, SERIES, SOFT, render
from fedsolve.markup import Markup, trusted

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_FAMILY = re.compile(r"\s*font-family:[^;]*;?")
# Before matplotlib 3.11 size, weight and family stand in one property.
_FONT = re.compile(r"font:\s*(?:(?P<weight>700|bold)\s+)?(?P<size>[\d.]+)px[^;]*;?")

# A page in the dark needs other inks: each colour of the common style becomes a variable of the page.
_VARIABLES = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    RULE: "var(--rule)",
    **{color: f"var(--series-{place})" for place, color in enumerate(SERIES, start=1)},
}
_COLORS = re.compile("|".join(_VARIABLES))


def inline_svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an `<svg>` element that a screen reader reads as `description`.

    name: begins every identifier in the drawing, so it must be one of its own on the page.
    """
    root = ElementTree.fromstring(render(figure, "svg", transparent=True))
    _drop(root, {f"{_SVG}metadata", f"{_SVG}style"})
    _rename(root, name)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        # Line breaks of the file mean nothing on the page.
        element.text, element.tail = (element.text or "").strip() or None, None
        for attribute in ("d", "x", "y", "transform"):
            if attribute in element.attrib:
                element.set(attribute, _short(element.attrib[attribute]))
        if "style" in element.attrib:
            element.set("style", _styled(element.attrib["style"]))
    # The view box keeps the proportions; the page decides the size.
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", description)
    root.set("style", f"max-width: {width * 4 / 3:.0f}px")
    return trusted(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False))


def _drop(element: ElementTree.Element, names: set[str]) -> None:
    for child in list(element):
        if child.tag in names:
            element.remove(child)
        else:
            _drop(child, names)


def _rename(root: ElementTree.Element, name: str) -> None:
    """Keep only the identifiers that are referred to, under names of this figure."""
    used: dict[str, str] = {}

    def renamed(old: str) -> str:
        return used.setdefault(old, f"{name}-{len(used) + 1}")

    for element in root.iter():
        if _HREF in element.attrib:
            element.set("href", "#" + renamed(element.attrib.pop(_HREF).removeprefix("#")))
        for attribute, value in list(element.attrib.items()):
            if "url(#" in value:
                element.set(attribute, _REFERENCE.sub(lambda match: f"url(#{renamed(match[1])})", value))
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in used:
            element.set("id", used[old])


def _short(numbers: str) -> str:
    """Coordinates to a hundredth of a point, and no more space than they need."""
    return " ".join(
        _LONG.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), numbers).split()
    )


def _styled(style: str) -> str:
    """The style with the page's colours and the page's font."""
    style = _FAMILY.sub("", _FONT.sub(_size, style))
    return _COLORS.sub(lambda match: _VARIABLES[match[0]], style).strip()


def _size(font: re.Match[str]) -> str:
    weight = "font-weight: bold; " if font["weight"] else ""
    return f"{weight}font-size: {font['size']}px;"
