"""The privacy package says what to install where its library is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["masking", "unmasking", "primitives", "secure"])
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
