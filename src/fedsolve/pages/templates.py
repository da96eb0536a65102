"""HTML from the templates beside this file. Every value is escaped, unless it is markup already."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedsolve.pages.words import unbroken

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """The page of a template with these values. A missing value is an error."""
    return _environment().get_template(template).render(values)


def html_table(title: str, rows: Iterable[Sequence[object]], heading: Sequence[object] = ()) -> str:
    """A table with a title, for notebooks (`_repr_html_`)."""
    return render("table.html", title=title, rows=rows, heading=heading)


@cache
def content_policy(script: str) -> str:
    """The header that allows a page its own script and style and requests to its own server, no more."""
    digests = (hashlib.sha256(asset(name).encode()).digest() for name in ("style.css", script))
    style, own = (f"sha256-{base64.b64encode(digest).decode()}" for digest in digests)
    return (
        f"default-src 'none'; style-src '{style}'; script-src '{own}'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> Markup:
    """A style, script or drawing of this package, not escaped."""
    return markup(resources.files("fedsolve.pages").joinpath(name).read_text(encoding="utf-8"))


def markup(text: str) -> Markup:
    """Trusted HTML, which is not escaped."""
    from markupsafe import Markup

    return Markup(text)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only pages need it

    made = Environment(
        loader=PackageLoader("fedsolve", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = unbroken
    made.globals["asset"] = asset
    return made
