"""Names, commands, methods, client steps and kinds of models are found by whoever asks first."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli.main import COMMANDS, main


def fresh(code: str) -> str:
    """What a new process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_fedsolve_imports_nothing_heavy():
    heavy = {"numpy", "scipy", "sklearn", "matplotlib", "rich", "torch", "flwr"}
    assert fresh(f"import sys, fedsolve; print(*{heavy} & set(sys.modules))").strip() == ""
    code = "from fedsolve.cli.main import main\ntry:\n    main(['--version'])\nfinally:\n    import sys\n"
    told = fresh(f"{code}    print(*{heavy} & set(sys.modules))")
    assert told == f"fedsolve {fs.__version__}\n\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("from fedsolve import registry; print(registry.method_class('scaffold').__name__)", "Scaffold"),
        ("from fedsolve import registry; print(registry.is_foreign('afl'))", "False"),
        (
            "from fedsolve.federation.participant import kind_of; print(kind_of('afl').step.__module__)",
            "fedsolve.closedform.afl",
        ),
        ("import fedsolve; print(fedsolve.federation.__name__)", "fedsolve.federation"),
        ("import fedsolve; print(hasattr(fedsolve, 'nothing'), 'AFL' in dir(fedsolve))", "False True"),
    ],
)
def test_what_enters_itself_is_found(code, printed):
    assert fresh(code).strip() == printed


def test_a_model_is_read_by_a_process_that_has_seen_no_method(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3))
    federation = fs.LocalFederation.from_arrays(x, x[:, 0] > 0, np.arange(60) % 3)
    fs.DeepAFL(layers=1, width=8).fit(federation).save(tmp_path / "m.safetensors")
    path = str(tmp_path / "m.safetensors")
    told = fresh(f"from fedsolve.model import load_model; print(load_model({path!r}).family)")
    assert told.strip() == "deep"


def test_a_step_from_outside_cannot_take_the_place_of_one_of_ours():
    code = (
        "from fedsolve.federation.participant import step\n"
        "try:\n    @step('afl')\n    def mine(data, request, memory): ...\n"
        "except ValueError as problem:\n    print(problem)\n"
    )
    assert "answered by fedsolve.closedform" in fresh(code)


def test_every_command_is_where_the_table_says():
    for name in COMMANDS:
        found = main.get_command(None, name)
        assert found is not None
        assert found.name == name
