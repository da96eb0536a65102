"""Docstrings that explain parameters line by line ("name: what it is") show them as a list on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): +(?=\S)", flags=re.MULTILINE)


class DocstringLists(griffe.Extension):
    """Turns such lines into list items; their indented continuations belong to them already."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ENTRY.sub(r"\n* `\1`: ", obj.docstring.value)
