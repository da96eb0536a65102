"""What the site makes of the pages, which people also read as plain Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
GENERATED = {"changelog.md": "CHANGELOG.md", "third-party-notices.md": "THIRD-PARTY-NOTICES.md"}
"""Pages of the site that stand outside docs/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are files of the repository's root."""
    for page, source in GENERATED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fences say where a command runs ("sh server install"); the site shows it as the block's title."""
    return re.sub(r"^```(sh|text) (\w+)[ \w]*$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The script that makes search work from files comes from the site, not from somebody's server."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "file_worker.js")
