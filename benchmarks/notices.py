"""THIRD-PARTY-NOTICES.md: what fedsolve needs, extra by extra, and under which licences.

    python -m benchmarks.notices --out THIRD-PARTY-NOTICES.md

Names come from pyproject.toml, all else from the metadata of the installed distributions, whose own needs are
followed to the end. Other environments may be searched as well: --also FOLDER, their site-packages.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

HEAD = """# Third-party notices

fedsolve is under the Apache License 2.0 (the file LICENSE). Its package contains no other project's code:
what it needs is installed beside it, each under its own licence. Below stands what
`pip install 'fedsolve[EXTRA]'` brings, by extra, with the needs of those needs, on Linux with Python 3.11. An
extra lists what the core does not have, `dev` what no other extra has. The built documentation site contains
the styles and scripts of Sphinx and of the PyData theme.

Versions are those of the environment in which this page was made, licences what each distribution says of
itself. Made by `python -m benchmarks.notices --out THIRD-PARTY-NOTICES.md`.
"""

TABLE = "| distribution | version | licence |\n|---|---|---|"


def wanted() -> dict[str, list[Requirement]]:
    """The requirements of the core and of every extra, in pyproject.toml's order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def licence(distribution: metadata.Distribution) -> str:
    """The licence that a distribution states: an expression, a few words, classifiers, or a file's title."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return expression
    classified = [
        line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License :: ")
    ]
    told = (about.get("License") or "").strip()
    if told and "\n" not in told and len(told) < 60 and told != "UNKNOWN":
        return told
    if words := "; ".join(each for each in classified if each != "OSI Approved"):
        return words
    texts = [path.read_text() for path in distribution.files or [] if path.name.upper().startswith("LICEN")]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return f"file: {lines[0]}" if lines else "none stated"


def closure(
    requirements: list[Requirement],
    installed: dict[str, metadata.Distribution],
    extras: dict[str, list[Requirement]],
) -> Iterator[tuple[str, metadata.Distribution | None]]:
    """Every distribution that the requirements lead to; None for one that is not installed."""
    waiting, seen = list(requirements), set()
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        if name == "fedsolve":
            waiting += [inner for extra in sorted(requirement.extras) for inner in extras[extra]]
            continue
        found = installed.get(name)
        yield name, found
        for line in (found.requires or []) if found else []:
            inner = Requirement(line)
            chosen = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in chosen):
                waiting.append(inner)


def notices(also: list[str]) -> str:
    """The page."""
    installed = {
        canonicalize_name(each.metadata["Name"]): each
        for each in metadata.distributions(path=[*also, *sys.path])
        if each.metadata["Name"]
    }
    groups = wanted()
    core: set[str] = set()
    listed: set[str] = set()
    parts = [HEAD]
    for extra, requirements in groups.items():
        found = dict(closure(requirements, installed, groups))
        rows = []
        for name in sorted(found.keys() - (listed if extra == "dev" else core)):
            each = found[name]
            if each is None:
                rows.append(f"| {name} | | not installed where this page was made |")
            else:
                version = each.version.partition("+")[0]
                rows.append(f"| {each.metadata['Name']} | {version} | {licence(each)} |")
        listed |= found.keys()
        core = core or set(found)
        title = "fedsolve itself" if extra == "core" else f"fedsolve[{extra}]"
        parts.append("\n".join([f"## {title}\n", TABLE, *rows, ""]))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the page is written; printed otherwise")
    parser.add_argument("--also", action="append", default=[], help="site-packages of another environment")
    given = parser.parse_args()
    page = notices(given.also)
    if given.out is None:
        print(page)
    else:
        given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
