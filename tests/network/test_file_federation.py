"""A federation as files: three folders, and a script that carries requests and answers between them."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import container
from fedsolve.errors import ModelFileError
from fedsolve.privacy import secure
from tests.command import document, fedsolve, refused

pytest.importorskip("cryptography")

SITES = ("north", "south", "west")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    return rng.normal(size=(150, 5)) + labels[:, None], labels


@pytest.fixture(scope="module")
def world(tmp_path_factory, rows):
    """The server's folder and one for each site: keys made where they belong, public ones exchanged."""
    top = tmp_path_factory.mktemp("world")
    features, labels = rows
    document("keys", "init", "--host", "server.example", "--keys", top / "server/keys")
    for number, name in enumerate(SITES):
        keys = top / name / "keys"
        document("keys", "client", name, "--keys", keys)
        shutil.copy(top / "server/keys/ca.crt", keys / "ca.crt")
        document("keys", "register", keys / f"clients/{name}.pub", "--keys", top / "server/keys")
        with open(top / name / "rows.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([*"abcde", "kind"])
            for row, label in zip(features[number::3].tolist(), labels[number::3].tolist(), strict=True):
                writer.writerow([*map(repr, row), f"kind {label}"])
    (top / "policy.toml").write_text("told = 100.0\n")  # these tables have 50 rows
    for name in SITES:
        known = [top / other / f"keys/clients/{other}.pub" for other in SITES]
        document("keys", "roster", *known, "--keys", top / name / "keys")
    return top


class Run:
    """One run: its own state folders in the world. It is in the open unless it is said to be secure."""

    def __init__(self, world: Path, state: Path, *words: str, secure: bool = False) -> None:
        self.world, self.state, self.words = world, state, words
        self.plain = () if secure else ("--plain",)

    def server(self, *answers: Path):
        keys = self.world / "server/keys"
        words = (*self.words, *self.plain)
        return ("files", "ask", *answers, "--keys", keys, "--state", self.state / "server", *words)

    def site(self, name: str, request: str | Path, out: Path, data: Path | None = None):
        folder = self.world / name
        words = ["files", "answer", request, "--keys", folder / "keys", "--name", name, "--out", out]
        words += ["--share-classes", *self.plain, "--policy", self.world / "policy.toml"]
        data = folder / "rows.csv" if data is None else data
        return (*words, "--state", self.state / name, "--data", data, "--label", "kind")

    def begin(self, *answers: Path) -> str:
        """The one request that the server writes."""
        (request,) = document(*self.server(*answers))["requests"]
        return request["file"]

    def answers(self, request: str, where: str, names=SITES) -> list[Path]:
        (self.state / where).mkdir(parents=True, exist_ok=True)
        files = [self.state / where / f"{name}.fst" for name in names]
        for name, file in zip(names, files, strict=True):
            document(*self.site(name, request, file))
        return files

    def carried(self, reply: dict, where: str) -> list[Path]:
        """All answers to the requests that the server waits for; some of the sites check questions."""
        assert reply["waiting_for"] == list(SITES) or not self.plain
        asked = [(one["file"], one["waiting_for"]) for one in reply["requests"]]
        assert sorted(name for _, names in asked for name in names) == reply["waiting_for"]
        return [file for request, names in asked for file in self.answers(request, where, names)]

    def to_the_end(self) -> dict:
        reply, rounds = document(*self.server()), 0
        while reply["status"] == "waiting":
            rounds += 1
            numbers = {Path(one["file"]).name.split("-")[1] for one in reply["requests"]}
            assert numbers == {str(rounds)}
            reply = document(*self.server(*self.carried(reply, f"round {rounds}")))
        return reply | {"rounds": rounds}


METHODS = {
    "afl": (("--method", "afl"), fs.AFL(**fs.AFL.recommended), 2),
    "deepafl": (
        ("--method", "deepafl", "--layers", "2", "--width", "8"),
        fs.DeepAFL(layers=2, width=8),
        None,
    ),
    "softmax": (("--method", "softmax"), fs.Softmax(), None),
}


def in_one_process(rows, method):
    """The model that the local engine makes of the same rows, and what it says of them."""
    features, labels = rows
    owners = np.arange(len(labels)) % 3
    kinds = np.array([f"kind {label}" for label in labels])
    federation = fs.LocalFederation.from_arrays(features, kinds, owners)
    federation.prefers = "exchanges"  # as engines do that send files
    model = method.fit(federation)
    return model, model.decision_function(features)


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_that_of_the_local_engine(world, rows, tmp_path, name):
    words, method, rounds = METHODS[name]
    reply = Run(world, tmp_path, *words).to_the_end()
    local, expected = in_one_process(rows, method)
    model = fs.load_model(reply["model"])
    found = model.undescribed().decision_function(rows[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert model.schema is not None
    assert [column.name for column in model.schema.columns] == list("abcde")
    assert reply["rounds"] == (1 + len(local.history) if rounds is None else rounds)
    assert reply["sites"] == list(SITES)
    assert not reply["secure"]
    # Once more changes nothing.
    assert document(*Run(world, tmp_path, *words).server())["model"] == reply["model"]


def test_everything_may_be_done_twice(world, tmp_path):
    run = Run(world, tmp_path, "--method", "afl")
    first = run.begin()
    assert run.begin() == first
    answers = run.answers(first, "a")
    again = run.answers(first, "b")
    waiting = document(*run.server(answers[0]))
    assert waiting["waiting_for"] == ["south", "west"]
    assert document(*run.server(again[0]))["waiting_for"] == ["south", "west"]
    second = run.begin(*answers, *again)
    assert second != first
    sums = run.answers(second, "c")
    document(*run.site("north", second, tmp_path / "north again.fst"))
    assert (tmp_path / "north again.fst").read_bytes() == sums[0].read_bytes()
    assert document(*run.server(*sums))["status"] == "complete"


@pytest.fixture
def second_round(world, tmp_path):
    """A run that waits for sums, its request, and the answers of all sites, not brought yet."""
    run = Run(world, tmp_path / "run", "--method", "afl")
    first = run.begin()
    descriptions = run.answers(first, "descriptions")
    request = run.begin(*descriptions)
    return run, request, descriptions, run.answers(request, "sums")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_bad_answers_are_refused_by_name_and_nothing_is_lost(second_round, world, tmp_path):
    run, request, _, sums = second_round
    before = files(run.state / "server")
    bad = tmp_path / "bad.fst"
    good = sums[0].read_bytes()

    def refuse(data: bytes, code: int, *fragments: str) -> None:
        bad.write_bytes(data)
        refused(fedsolve(*run.server(bad)), code, "bad.fst", *fragments)
        assert files(run.state / "server") == before

    for place in (0, 9, 40, len(good) // 2, len(good) - 1):
        refuse(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :], 4, "damaged")
    refuse(b"", 4, "damaged")
    refuse(good[: len(good) // 2], 4, "damaged")
    refuse(Path(request).read_bytes(), 4, "a site's answer (.fst) is needed")

    arrays, note = container.from_bytes(good, what="", error=ModelFileError)

    def forged(arrays=arrays, **changes) -> bytes:
        """Altered, with a new seal but the old signature."""
        return container.to_bytes(arrays, {**note, **changes}, sealed=True)

    payload = arrays["payload"].copy()
    payload[-1] ^= 1
    refuse(forged({"payload": payload}), 3, "not signed by the one it says it is from ('north')")
    refuse(forged(sender="south"), 3, "not signed by the one it says it is from ('south')")
    refuse(forged(sender="east"), 3, "'east', who is not registered")
    refuse(forged(run="0" * 16), 3, "not signed")

    other = Run(world, tmp_path / "other", "--method", "afl")
    foreign = other.answers(other.begin(), "descriptions")
    refuse(foreign[0].read_bytes(), 3, "belongs to another run")

    assert document(*run.server(*sums))["status"] == "complete"


def test_a_second_and_other_answer_is_refused(second_round, world, tmp_path):
    run, request, _, sums = second_round
    assert document(*run.server(sums[0]))["waiting_for"] == ["south", "west"]
    lines = (world / "north/rows.csv").read_text().splitlines()
    (tmp_path / "fewer.csv").write_text("\n".join(lines[:-1]) + "\n")
    out = tmp_path / "again.fst"
    shutil.rmtree(run.state / "north")  # it lost its record, and answers with other rows
    document(*run.site("north", request, out, data=tmp_path / "fewer.csv"))
    refused(fedsolve(*run.server(out)), 3, "again.fst", "has answered", "and otherwise")
    assert document(*run.server(*sums))["status"] == "complete"


def test_a_site_refuses_what_is_not_from_its_server_or_not_for_it(second_round, world, tmp_path):
    run, request, _, _ = second_round
    out = tmp_path / "no.fst"
    data = Path(request).read_bytes()
    arrays, note = container.from_bytes(data, what="", error=ModelFileError)
    forged = tmp_path / "forged.fsq"

    def forge(**changes) -> None:
        forged.write_bytes(container.to_bytes(arrays, {**note, **changes}, sealed=True))

    forge(run="0" * 16)
    refused(fedsolve(*run.site("north", forged, out)), 3, "forged.fsq", "not signed")
    document("keys", "init", "--host", "evil.example", "--keys", tmp_path / "evil")
    forge(certificate=(tmp_path / "evil/server.pem").read_text())
    refused(fedsolve(*run.site("north", forged, out)), 3, "forged.fsq", "not signed")
    forged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(fedsolve(*run.site("north", forged, out)), 4, "forged.fsq", "damaged")
    document("keys", "client", "east", "--keys", world / "north/keys")
    east = run.site("east", request, out, data=world / "north/rows.csv")
    words = [world / "north/keys" if word == world / "east/keys" else word for word in east]
    refused(fedsolve(*words), 2, "is for north, south, west, not for 'east'")
    # Rows that changed since the site took part.
    lines = (world / "north/rows.csv").read_text().splitlines()
    (tmp_path / "fewer.csv").write_text("\n".join(lines[:-1]) + "\n")
    for kept in (run.state / "north/answered").iterdir():
        kept.unlink()
    result = fedsolve(*run.site("north", request, out, data=tmp_path / "fewer.csv"))
    assert result.exit_code == 2
    assert "the rows of 'north' are not those" in result.stderr
    assert not out.exists()


def test_a_site_that_does_not_fit_may_describe_itself_anew(world, tmp_path):
    run = Run(world, tmp_path, "--method", "afl")
    first = run.begin()
    answers = run.answers(first, "a")
    lines = (world / "north/rows.csv").read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join([lines[0].replace("a,b", "b,a"), *lines[1:]]) + "\n")
    wrong = tmp_path / "wrong.fst"
    document(*run.site("north", first, wrong, data=tmp_path / "other.csv"))
    result = fedsolve(*run.server(wrong, *answers[1:]))
    assert result.exit_code == 3
    assert "'north'" in result.stderr
    assert document(*run.server(answers[0]))["status"] == "waiting"


# -- secure sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setups", "before"),
    [
        ("afl", 1, 1),
        pytest.param("deepafl", 1, 4, marks=pytest.mark.slow),
        pytest.param("softmax", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_secure_sums_in_files(world, rows, tmp_path, monkeypatch, name, setups, before):
    """Two rounds for keys, four for the census, and three for each sum (signatures, masked sums, opening);
    new keys when those are used. Before them what the sites have, and three rounds for a seed where a method
    has one."""
    words, method, _ = METHODS[name]
    if setups > 1:
        monkeypatch.setattr(secure, "_MOST_SLOTS", 5)
    reply = Run(world, tmp_path, *words, secure=True).to_the_end()
    seed = json.loads(Path(reply["report"]).read_text())["seed"]
    if seed is not None:
        method = dataclasses.replace(method, seed=seed)
    local, expected = in_one_process(rows, method)
    found = fs.load_model(reply["model"]).undescribed().decision_function(rows[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert reply["secure"]
    assert reply["rounds"] == before + 2 * setups + 4 + 3 * len(local.history)
    sent = [json.loads(line) for line in (tmp_path / "north/sent.jsonl").read_text().splitlines()]
    assert [line for line in sent if "public keys" in line["text"]]
    assert not [line for line in sent if line["text"].startswith("answered")]  # nothing in the open


def test_secure_sums_may_be_stopped_and_repeated_at_every_step(world, rows, tmp_path):
    run = Run(world, tmp_path, "--method", "afl", secure=True)
    reply, rounds = document(*run.server()), 0
    while reply["status"] == "waiting":
        rounds += 1
        requests = {one["file"]: Path(one["file"]).read_bytes() for one in reply["requests"]}
        assert document(*run.server()) | {"seconds": 0} == reply | {"seconds": 0}
        files_ = run.carried(reply, f"{rounds} first")
        first = [path.read_bytes() for path in files_]
        if rounds > 1:  # a description may change until the run begins, and its signature does
            assert [path.read_bytes() for path in run.carried(reply, f"{rounds} again")] == first
        part = document(*run.server(*files_[1:]))
        assert part["waiting_for"] == [files_[0].stem]
        assert {path: Path(path).read_bytes() for path in requests} == requests
        reply = document(*run.server(*files_[:1], *files_))
    assert rounds == 10
    expected = in_one_process(rows, METHODS["afl"][1])[1]
    found = fs.load_model(reply["model"]).undescribed().decision_function(rows[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_what_is_wrong_with_a_secure_run_is_named(world, tmp_path):
    run = Run(world, tmp_path / "run", "--method", "afl", secure=True)
    first = run.begin()
    out = tmp_path / "no.fst"
    # One side in the open, the other not.
    words = run.site("north", first, out)
    result = fedsolve(*words, "--plain")
    assert result.exit_code == 2
    assert "the server makes secure sums, and 'north' was started with --plain" in result.stderr
    refused(fedsolve(*run.server(), "--plain"), 4, "was begun in secure sums", "Leave out --plain")
    keys = run.begin(*run.answers(first, "1"))
    two = run.answers(keys, "2")
    # Keys of another run of the same sites, and a site's keys under another's name.
    other = Run(world, tmp_path / "other", "--method", "afl", secure=True)
    foreign = other.answers(other.begin(*other.answers(other.begin(), "1")), "2")
    refused(fedsolve(*run.server(foreign[0])), 3, "north.fst", "belongs to another run")
    altered = bytearray(two[0].read_bytes())
    altered[len(altered) // 2] ^= 4
    out.write_bytes(altered)
    refused(fedsolve(*run.server(out)), 4, "no.fst", "damaged")
    # New keys to the same question: the first ones count.
    shutil.copytree(run.state / "north", run.state / "kept")
    shutil.rmtree(run.state / "north")
    anew = run.answers(keys, "anew", ["north"])
    document(*run.server(two[0]))
    refused(fedsolve(*run.server(*anew)), 3, "has answered", "and otherwise")
    shares = run.begin(*two)
    # A site that lost its secrets sits the run out, by name; with them it goes on.
    result = fedsolve(*run.site("north", shares, out))
    assert result.exit_code == 2
    assert "'north' does not find its own keys among those of the members" in result.stderr
    shutil.rmtree(run.state / "north")
    shutil.copytree(run.state / "kept", run.state / "north")
    # A site that knows another by another key.
    roster = world / "south/keys/roster"
    known = roster.read_text()
    document("keys", "client", "west", "--keys", tmp_path / "impostor")
    document("keys", "roster", "--remove", "west", "--keys", world / "south/keys")
    document("keys", "roster", tmp_path / "impostor/clients/west.pub", "--keys", world / "south/keys")
    result = fedsolve(*run.site("south", shares, out))
    assert result.exit_code == 2
    assert "are not signed by 'west' as this site knows it" in result.stderr
    roster.write_text(known)
    reply = document(*run.server(*run.answers(shares, "3")))
    reply = document(*run.server(*run.carried(reply, "checked")))
    # The masked sums of another question, for one site only.
    (north,) = [one["file"] for one in reply["requests"] if one["waiting_for"] == ["north"]]
    refused(fedsolve(*run.site("south", north, out)), 2, "is for north, not for 'south'")
    while reply["status"] == "waiting":
        reply = document(*run.server(*run.carried(reply, str(len(reply["requests"])))))
    assert reply["secure"]


def test_a_secure_run_takes_three_sites(tmp_path):
    document("keys", "init", "--host", "server.example", "--keys", tmp_path / "keys")
    for name in ("north", "south"):
        document("keys", "client", name, "--keys", tmp_path / "keys")
        document("keys", "register", tmp_path / f"keys/clients/{name}.pub", "--keys", tmp_path / "keys")
    result = fedsolve(
        "files", "ask", "--keys", tmp_path / "keys", "--state", tmp_path / "run", "--method", "afl"
    )
    assert result.exit_code == 2
    assert "a secure sum takes 3 sites at least" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_files_need_no_network_and_say_what_they_need(world, tmp_path):
    def without(module: str, *words) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.modules[{module!r}] = None; from fedsolve.cli.main import main; main()"
        line = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True)

    run = Run(world, tmp_path, "--method", "afl", secure=True)
    told = without("httpx", *run.server(), "--json")
    assert told.returncode == 0, told.stderr
    (request,) = json.loads(told.stdout)["requests"]
    answering = run.site("north", request["file"], tmp_path / "north.fst")
    assert without("httpx", *answering).returncode == 0
    assert (tmp_path / "north.fst").exists()
    for words in (answering, ("keys", "client", "east", "--keys", tmp_path / "keys")):
        told = without("cryptography", *words)
        assert told.returncode == 2
        assert told.stderr.count("\n") == 1
        assert "pip install 'fedsolve[privacy]'" in told.stderr


@pytest.mark.torch
def test_pixels_of_sites_are_cut_and_mirrored_only_in_the_form_for_it(world, tmp_path, monkeypatch):
    """Every site reads its own images, so that the server hears in which form before it begins."""
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))
    method = ("--method", "fedavg", "--network", "mlp:4", "--rounds", "1", "--shape", "1,8,8", "--crop", "1")
    for number, backbone in enumerate(("pixels", "pixels?order=channels&normalise=half")):
        run = Run(world, tmp_path / str(number), *method)
        request, files = run.begin(), []
        for name in SITES:
            files.append(tmp_path / str(number) / f"{name}.fst")
            words = run.site(name, request, files[-1], "digits")
            document(*words[: words.index("--label")], "--backbone", backbone)
        if number:
            assert document(*run.server(*files))["status"] == "waiting"
        else:
            stopped = fedsolve(*run.server(*files))
            assert stopped.exit_code == 2
            assert "'pixels' gives pixels in the order of rows and on another scale" in stopped.stderr
