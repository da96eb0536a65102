"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedsolve.experiments.result_tables import ResultTable, Row

_LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "α": r"$\alpha$",
    "γ": r"$\gamma$",
    "η": r"$\eta$",
    "λ": r"$\lambda$",
    "ρ": r"$\rho$",
    "τ": r"$\tau$",
    "Φ": r"$\Phi$",
    "±": r"$\pm$",
    "–": "--",
    "<": r"$<$",
    ">": r"$>$",
}


def markdown(table: ResultTable) -> str:
    """A table under a heading, in Markdown; rows of a paper are in italics."""
    head = [_plain(table.corner), *map(_plain, table.columns)]
    lines = [_line(head), _line([":---", *["---:"] * len(table.columns)])]
    for row in table.rows:
        cells = [_plain(row.label), *(_plain(text) for text in _texts(row))]
        lines.append(_line([f"*{cell}*" if cell else "" for cell in cells] if row.paper else cells))
    notes = [f"{_plain(note)}  " for note in _all_notes(table)]
    return "\n".join([f"### {_plain(table.title)}", "", *lines, "", *notes]).rstrip() + "\n"


def latex(table: ResultTable) -> str:
    """A table environment for LaTeX, with the rules of the package booktabs."""
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{_tex(table.title)}. {' '.join(map(_tex, _all_notes(table)))}}}".replace(" }", "}"),
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        _tex_line([table.corner, *table.columns]),
        r"\midrule",
    ]
    for row in table.rows:
        cells = [row.label, *_texts(row)]
        lines.append(_tex_line(cells, r"\textit{%s}" if row.paper else "%s"))
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _all_notes(table: ResultTable) -> list[str]:
    return [*table.notes, *([table.remark] if table.remark else [])]


def _texts(row: Row) -> list[str]:
    return ["" if entry is None else entry.text for entry in row.entries]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text without what Markdown would take for markup."""
    return re.sub(r"([\\|*_<>`])", r"\\\1", text)


def _tex_line(cells: Sequence[str], style: str = "%s") -> str:
    return " & ".join(style % _tex(cell) if cell else "" for cell in cells) + r" \\"


def _tex(text: str) -> str:
    return "".join(_LATEX_SIGNS.get(sign, sign) for sign in text).replace("*", r"$^{*}$")
