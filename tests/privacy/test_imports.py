"""The privacy package imports what lies below it, and says what to install where its library is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedsolve.privacy

BELOW = ("fedsolve.federation", "fedsolve.privacy")
SMALL = {"checks", "container", "errors", "labels", "model", "permissions", "registry", "threads"}
FILES = sorted(Path(fedsolve.privacy.__file__).parent.glob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            found |= (
                {node.module or ""}
                if node.module != "fedsolve"
                else {f"fedsolve.{a.name}" for a in node.names}
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_point_downwards(path: Path) -> None:
    for name in imported(path):
        if name.split(".")[0] == "fedsolve":
            assert name.startswith(BELOW) or name.split(".")[1] in SMALL, f"{path.name} imports {name}"


@pytest.mark.parametrize("module", ["masking", "unmasking", "signatures", "key_streams", "secure"])
def test_a_missing_library_is_named_with_its_extra(module: str) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import fedsolve.privacy.ring, fedsolve.privacy.shamir\n"
        "from fedsolve.errors import DataError\n"
        f"try:\n    import fedsolve.privacy.{module}\n"
        "except DataError as problem:\n    print(problem)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "fedsolve[privacy]" in told


def test_fedsolve_offers_secure_sums_without_importing_their_library() -> None:
    code = (
        "import sys, fedsolve\n"
        "fedsolve.privacy\n"
        "assert not any(name.split('.')[0] == 'cryptography' for name in sys.modules)\n"
        "fedsolve.privacy.SecureFederation\n"
        "assert 'cryptography' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
