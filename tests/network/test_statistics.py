"""A regression over processes with secure sums, and through files: the pooled one both times."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedsolve as fs
from tests.command import document
from tests.network.security.keyring import keys_for
from tests.network.security.processes import free_port, running
from tests.statistics.tables import near, table

from .test_server import PATIENCE, fedsolve

NAMES = ("north", "south", "west", "east")
FORMULA = "cens ~ age + C(tgrade) + pnodes"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A table for each hospital, and the schema of all."""
    frame, found = table("gbsg2"), {}
    for place, name in enumerate(NAMES):
        found[name] = tmp_path / f"{name}.csv"
        frame.iloc[place::4].to_csv(found[name], index=False)
    frame.to_csv(tmp_path / "all.csv", index=False)
    document("schema", tmp_path / "all.csv", "--label", "cens", "--out", tmp_path / "schema.toml")
    return found


def is_pooled(path: Path, files: dict[str, Path]) -> None:
    """The model of this file is that of all rows, by statsmodels and by one process."""
    model = fs.load_model(path)
    expected = smf.glm(FORMULA, table("gbsg2"), family=sm.families.Binomial()).fit(tol=1e-14)
    near(model.coefficient, expected.params[list(model.names)], 1e-8)
    near(model.standard_error, expected.bse[list(model.names)], 1e-8)
    local = document("glm", FORMULA, *files.values(), "--family", "binomial")
    for head, found in (("coefficient", model.coefficient), ("se", model.standard_error)):
        near(found, [line[head] for line in local["table"]], 1e-9)
    near(model.facts["log_likelihood"], local["log_likelihood"], 1e-9)
    assert np.isclose(model.predict(table("gbsg2").drop(columns=["cens", "time"])), expected.predict()).all()


@pytest.mark.network
@pytest.mark.slow
def test_processes_with_secure_sums_give_the_pooled_regression(
    files: dict[str, Path], tmp_path: Path
) -> None:
    keys = keys_for(tmp_path / "keys", NAMES)
    for name in NAMES:
        keys.roster.add(keys.client_public_key(name))
    address, out, schema = f"127.0.0.1:{free_port()}", tmp_path / "glm.safetensors", tmp_path / "schema.toml"
    common = ("--keys", keys.folder, "--schema", schema)
    asked = ("--method", "glm", "--formula", FORMULA, "--family", "binomial")
    line = fedsolve("server", "--listen", address, "--clients", 4, *common, *asked, "--out", out)
    log = tmp_path / "server.log"
    with ExitStack() as stack:
        server = stack.enter_context(running([*line, "--state", str(tmp_path / "state")], log))
        for name, data in files.items():
            words = ("client", "--server", address, "--name", name, "--data", data, "--once", *common)
            site = fedsolve(*words, "--state", tmp_path / f"state-{name}")
            stack.enter_context(running(site, tmp_path / f"{name}.log"))
        assert server.wait(PATIENCE) == 0, log.read_text()
    assert "SECURE SUMS" in log.read_text()
    is_pooled(out, files)


@pytest.mark.slow
def test_files_give_the_pooled_regression(files: dict[str, Path], tmp_path: Path) -> None:
    keys, out, schema = (
        keys_for(tmp_path / "keys", NAMES),
        tmp_path / "glm.safetensors",
        tmp_path / "schema.toml",
    )
    common = ("--keys", keys.folder, "--schema", schema, "--plain")
    ask = ("files", "ask", *common, "--method", "glm", "--formula", FORMULA, "--family", "binomial")
    answers: list[Path] = []
    for turn in range(20):
        reply = document(*ask, *answers, "--state", tmp_path / "server", "--out", out)
        if reply["status"] == "complete":
            break
        answers = []
        for request in reply["requests"]:
            for name in request["waiting_for"]:
                answers.append(tmp_path / f"{name}-{turn}.fst")
                words = ("files", "answer", request["file"], "--name", name, "--data", files[name], *common)
                document(
                    *words, "--share-classes", "--state", tmp_path / f"files-{name}", "--out", answers[-1]
                )
    assert reply["result"]["exchanges"] == 7
    is_pooled(out, files)
