"""The documentation site, built by Sphinx. People also read the pages as plain Markdown."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import GenericAlias
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

import fedsolve

sys.path.insert(0, str(Path(__file__).parent))
from sequence_diagram import drawn

project, author, copyright = "fedsolve", "the fedsolve authors", "the fedsolve authors"
version = release = fedsolve.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["README.md"]
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_heading_anchors = 4
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = f"fedsolve {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_show_search_summary = False  # browsers read no other file from a file
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {"text": "fedsolve"},
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

ENTRY = re.compile(r"^( *)([a-z_]\w*(?:, [a-z_]\w*)*): +(?=\S)")
"""A line of a docstring that explains a parameter: "name: what it is"."""


def titled(app: Sphinx, page: str, source: list[str]) -> None:
    """Fences say where a command runs ("sh server install"); the site shows it as the block's title."""
    title = r"```{code-block} \1\n:caption: \2\n"
    source[0] = re.sub(r"^```(sh|text) (\w+)[ \w]*$", title, source[0], flags=re.MULTILINE)
    source[0] = re.sub(
        r"^```mermaid\n(.*?)^```$",
        lambda found: f"```{{raw}} html\n{drawn(found[1])}\n```",
        source[0],
        flags=re.MULTILINE | re.DOTALL,
    )


def listed(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are Markdown-like text: `code` in single ticks, parameters line by line."""
    text: list[str] = []
    inside = False
    for line in lines:
        found = ENTRY.match(line)
        if found and not inside:
            text.append("")
        inside = found is not None or (inside and line.startswith("  "))
        if found:
            line = f"* ``{found[2]}``: {line[found.end() :]}"
        elif inside:
            line = "  " + line.strip()
        elif text and text[-1].startswith(("* ", "  ")):
            text.append("")
        plain = line.replace("|", r"\|").replace("**", r"\*\*")
        text.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", plain))
    lines[:] = [] if isinstance(thing, GenericAlias) else text


def typeset(self: Any, node: nodes.Element) -> None:
    """Formulas as MathML, which browsers show without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    self.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (typeset, None), (typeset, None))
    app.connect("source-read", titled)
    app.connect("autodoc-process-docstring", listed)
