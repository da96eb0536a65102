"""Tables as Markdown and as LaTeX with the rules of booktabs; values as JSON can hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SPELLED = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_GREEK = {
    "α": "alpha",
    "γ": "gamma",
    "η": "eta",
    "λ": "lambda",
    "ρ": "rho",
    "τ": "tau",
    "Φ": "Phi",
    "±": "pm",
}
_LATEX = (
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {sign: rf"$\{name}$" for sign, name in _GREEK.items()}
    | {"–": "--", "<": "$<$", ">": "$>$", **_SPELLED}
)

Lines = Iterable[Sequence[str]]


def markdown_text(text: str) -> str:
    """Text without what Markdown would take for markup."""
    return re.sub(r"([\\|*_<>`])", r"\\\1", text)


def latex_text(text: str) -> str:
    """Text without what LaTeX would take for commands; a star that marks or explains a mark is raised."""
    return re.sub(r"^\*(?= )|\*$", "$^{*}$", "".join(_LATEX.get(sign, sign) for sign in text))


def markdown_table(heads: Sequence[str], lines: Lines, italic: Iterable[int] = ()) -> str:
    """A table whose first column is flush left; the lines of these numbers are in italics."""
    rows = [[*map(markdown_text, line)] for line in lines]
    for number in italic:
        rows[number] = [f"*{cell}*" if cell else "" for cell in rows[number]]
    rules = [":---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[*map(markdown_text, heads)], rules, *rows])


def latex_table(heads: Sequence[str], lines: Lines, italic: Iterable[int] = ()) -> str:
    """The same as a tabular."""
    rows = [[*map(latex_text, line)] for line in lines]
    for number in italic:
        rows[number] = [rf"\textit{{{cell}}}" if cell else "" for cell in rows[number]]
    head, *told = (" & ".join(row) + r" \\" for row in [[*map(latex_text, heads)], *rows])
    begin = rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *told, r"\bottomrule", r"\end{tabular}"])


def plain(value: Any) -> Any:
    """The value as JSON can hold it; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
