"""Sequence diagrams as pictures: the few words of Mermaid that the pages use, drawn without a script."""

from __future__ import annotations

import re
from html import escape

STEP, LEFT, RIGHT, WIDTH = 34, 90, 670, 760


def drawn(text: str) -> str:
    """An SVG in the colours of the page. Lines: participants, arrows, loops."""
    names: dict[str, tuple[str, int]] = {}
    parts: list[str] = []
    y, loops = 70, []
    for line in map(str.strip, text.splitlines()):
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[found[1]] = (found[2], LEFT if not names else RIGHT)
        elif found := re.fullmatch(r"(\w+)(--?)>>(\w+): (.+)", line):
            start, end = names[found[1]][1], names[found[3]][1]
            dash = ' stroke-dasharray="6 4"' if found[2] == "--" else ""
            tip = end - 10 if end > start else end + 10
            parts.append(f'<line x1="{start}" y1="{y}" x2="{tip}" y2="{y}" stroke="currentColor"{dash}/>')
            parts.append(f'<path d="M{tip} {y - 5}L{end} {y}L{tip} {y + 5}z" fill="currentColor"/>')
            middle = (LEFT + RIGHT) // 2
            parts.append(f'<text x="{middle}" y="{y - 7}" text-anchor="middle">{escape(found[4])}</text>')
            y += STEP
        elif line.startswith("loop "):
            loops.append((y - 12, line[5:]))
            y += STEP
        elif line == "end":
            top, title = loops.pop()
            parts.append(
                f'<rect x="20" y="{top}" width="{WIDTH - 40}" height="{y - top - 16}" fill="none" '
                'stroke="currentColor" stroke-opacity="0.4"/>'
            )
            parts.append(f'<text x="28" y="{top + 16}" font-style="italic">{escape(title)}</text>')
            y += STEP // 2
        elif line not in ("", "sequenceDiagram"):
            raise ValueError(f"cannot draw '{line}'")
    for title, x in names.values():
        parts.append(f'<text x="{x}" y="24" text-anchor="middle" font-weight="bold">{escape(title)}</text>')
        parts.append(f'<line x1="{x}" y1="34" x2="{x}" y2="{y}" stroke="currentColor" stroke-opacity="0.4"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 10}" role="img" font-size="14" fill="currentColor" '
        f'style="width:100%;max-width:{WIDTH}px">{"".join(parts)}</svg>'
    )
