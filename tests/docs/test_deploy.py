"""What is in deploy/: units that systemd accepts, an image of pinned packages, a compose file to fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sklearn.datasets import load_breast_cancer

import fedsolve
from tests.command import fedsolve as run_fedsolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = ("fedsolve-server.service", "fedsolve-client.service")
PROGRAM = "/opt/fedsolve/bin/fedsolve"

analyze = shutil.which("systemd-analyze")
with_systemd = pytest.mark.skipif(analyze is None, reason="systemd-analyze is not installed here")


@with_systemd
def test_systemd_accepts_the_units(tmp_path):
    # The program must exist for this: another one stands in for it.
    units = []
    for name in UNITS:
        units.append(tmp_path / name)
        units[-1].write_text((DEPLOY / "systemd" / name).read_text().replace(PROGRAM, "/bin/true"))

    def verify():
        line = [str(analyze), "verify", "--man=no", *map(str, units)]
        result = subprocess.run(line, capture_output=True, text=True, timeout=60)
        return result.returncode, [line for line in result.stderr.splitlines() if str(tmp_path) in line]

    assert verify() == (0, [])
    units[0].write_text(units[0].read_text().replace("MemoryMax=8G", "MemoryMaximum=8G"))
    assert "Unknown key 'MemoryMaximum'" in verify()[1][0]


@with_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_calls_the_units_hardened(name):
    line = [str(analyze), "security", "--offline=yes", "--no-pager", str(DEPLOY / "systemd" / name)]
    told = subprocess.run(line, capture_output=True, text=True, timeout=60).stdout
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", told)
    assert exposure is not None, told
    assert float(exposure[1]) <= 2.0  # of 10; 9.6 is a unit without any of it


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text())
    return [
        (line.split()[0], line.partition(" ")[2].strip())
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def argument(name: str) -> str:
    return dict(words.split("=", 1) for kind, words in instructions() if kind == "ARG")[name]


def test_the_image_is_pinned_and_does_not_run_as_root():
    said = instructions()
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", argument("BASE"))
    assert all(words.split()[0] == "${BASE}" for kind, words in said if kind == "FROM")
    (user,) = [words for kind, words in said if kind == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    after = [kind for kind, _ in said[[kind for kind, _ in said].index("USER") :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    for kind, words in said:
        if kind == "COPY" and not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(argument("EXTRAS").split(",")) <= set(project["optional-dependencies"])


def test_every_package_of_the_image_has_its_version_in_constraints():
    pinned = {
        canonicalize_name(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = list(project["dependencies"])
    for extra in argument("EXTRAS").split(","):
        waiting += project["optional-dependencies"][extra]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = Requirement(waiting.pop())
        name, chosen = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": each}) for each in (*chosen, "")):
                waiting.append(str(need).partition(";")[0])
    assert {name for name, _ in seen} - pinned == set()
    assert len(seen) > 30


SERVICE_KEYS = {
    *("image", "build", "user", "restart", "stop_grace_period", "read_only", "cap_drop", "security_opt"),
    *("tmpfs", "mem_limit", "pids_limit", "ulimits", "logging", "profiles", "command", "ports", "volumes"),
}


def test_the_compose_file_fits_the_image_and_the_configuration():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "site"}
    (user,) = [words for kind, words in instructions() if kind == "USER"]
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE_KEYS  # one misspelt would have no effect
        assert service["image"] == f"fedsolve:{fedsolve.__version__}"
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert service["user"] == user
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        mounts = {mount.rsplit(":", 2 if mount.endswith(":ro") else 1)[1] for mount in service["volumes"]}
        assert {"/etc/fedsolve", "/var/lib/fedsolve"} <= mounts
        command, flag, path = service["command"]
        settings = tomllib.loads((DEPLOY / Path(path).name).read_text())[command]
        assert flag == "--config"
        for place in ("keys", "state", "data", "store", "out"):
            if place in settings:
                assert any(settings[place].startswith(mount + "/") for mount in mounts), place
        listed = [mount.split(":")[0] for mount in service["volumes"]]
        assert {each for each in listed if each.endswith("-state")} <= set(compose["volumes"]), name
    assert compose["services"]["server"]["ports"] == ["${FEDSOLVE_PORT:-9092}:9092"]
    assert "ports" not in compose["services"]["site"]


@pytest.mark.parametrize(("file", "command"), [("server.toml", "server"), ("site.toml", "client")])
def test_every_setting_of_the_configuration_is_an_option(file: str, command: str) -> None:
    (table,) = tomllib.loads((DEPLOY / file).read_text()).items()
    assert table[0] == command
    helped = run_fedsolve(command, "--help-all").stdout
    assert [name for name in table[1] if f"--{name.replace('_', '-')}" not in helped] == []


def test_the_page_names_files_that_exist():
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"deploy/[\w./-]*\.[a-z]+|deploy/Containerfile", page))
    assert len(named) >= 6
    for path in named:
        assert (ROOT / path).exists(), path
    assert f"fedsolve:{fedsolve.__version__}" in page


@pytest.fixture(scope="module")
def image():
    """The builder that made the image, and the image's name."""
    base = next(
        words.partition("=")[2] for kind, words in instructions() if kind == "ARG" and "BASE" in words
    )
    for builder in ("podman", "docker", "buildah"):
        known = [builder, "inspect", "--type", "image", base]
        if shutil.which(builder) and subprocess.run(known, capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(f"no podman, docker or buildah here that has {base}")
    name = f"fedsolve:{fedsolve.__version__}"
    line = [builder, "build", "-f", "deploy/Containerfile", "-t", name, "."]
    subprocess.run(line, cwd=ROOT, check=True, timeout=1200)
    return builder, name


@pytest.mark.slow
def test_the_image_is_built_where_a_builder_has_its_base(image):
    builder, name = image
    line = [builder, "run", "--rm", name, "--version"]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=120).stdout
    assert said == f"fedsolve {fedsolve.__version__}\n"


SITES = ("north", "south", "west")
HERE = "{network_mode: host, ulimits: {nproc: 4096}}"
"""One machine is server and sites here, by its own address, and need not be allowed to raise limits."""


@pytest.mark.slow
@pytest.mark.network
def test_a_server_and_three_sites_in_containers_make_one_model(image, tmp_path):
    builder, name = image
    compose = shutil.which(f"{builder}-compose")
    if compose is None:
        pytest.skip(f"{builder}-compose is not installed here")
    with socket.create_server(("127.0.0.1", 0)) as found:
        free_port = found.getsockname()[1]
    rows = load_breast_cancer(as_frame=True).frame.iloc[:, [0, 1, 4, -1]]
    rows["target"] = rows["target"].map({0: "no", 1: "yes"})
    rows.columns = ["radius", "texture", "smoothness", "outcome"]
    for who in ("server", *SITES):
        for folder in (tmp_path / who, tmp_path / who / "etc", tmp_path / who / "data"):
            folder.mkdir()
        file = "server.toml" if who == "server" else "site.toml"
        text = (DEPLOY / file).read_text().replace("fedsolve.hospital.example:9092", f"localhost:{free_port}")
        text = text.replace("0.0.0.0:9092", f"127.0.0.1:{free_port}").replace('"north"', f'"{who}"')
        (tmp_path / who / "etc" / file).write_text(text)
    for part, site in enumerate(SITES):
        rows.iloc[part::3].to_csv(tmp_path / site / "data" / "patients.csv", index=False)
    (tmp_path / "here.yaml").write_text(f"services: {{server: {HERE}, site: {HERE}}}\n")

    def owned() -> None:
        for path in (path for who in ("server", *SITES) for path in (tmp_path / who).rglob("*")):
            os.chown(path, 10001, 10001)
            path.chmod(0o700 if path.is_dir() else 0o600)

    def keys(who: str, *words: str) -> None:
        owned()
        mounts = ["-v", f"{tmp_path / who / 'etc'}:/etc/fedsolve"]
        line = [builder, "run", "--rm", *mounts, name, "keys", *words, "--keys", "/etc/fedsolve/keys"]
        subprocess.run(line, check=True, capture_output=True, timeout=120)

    def carry(path: str, whence: str, *whither: str) -> None:
        for who in whither:
            shutil.copy(tmp_path / whence / "etc" / path, tmp_path / who / "etc" / Path(path).name)

    def composed(who: str, *words: str) -> str:
        line = [compose, "-p", f"fedsolve-{who}", "-f", str(DEPLOY / "compose.yaml")]
        line += ["-f", str(tmp_path / "here.yaml"), "--profile", "server" if who == "server" else "site"]
        places = {"FEDSOLVE_ETC": str(tmp_path / who / "etc"), "FEDSOLVE_DATA": str(tmp_path / who / "data")}
        settings = {"env": os.environ | places, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([*line, *words], **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    keys("server", "init", "--host", "localhost")
    for site in SITES:
        keys(site, "client", site)
        carry(f"keys/clients/{site}.pub", site, "server", *(other for other in SITES if other != site))
        shutil.copy(tmp_path / "server/etc/keys/ca.crt", tmp_path / site / "etc/keys/ca.crt")
    for who in ("server", *SITES):
        others = [f"/etc/fedsolve/{site}.pub" for site in SITES if site != who]
        keys(who, "register" if who == "server" else "roster", *others)
    owned()
    state = "fedsolve-server_server-state:/var/lib/fedsolve"
    try:
        for who in ("server", *SITES):
            composed(who, "up", "-d", "--no-build")
        until = time.monotonic() + 240
        look = [builder, "run", "--rm", "-v", state, name, "info", "model.safetensors", "--json"]
        while (found := subprocess.run(look, capture_output=True, text=True)).returncode:
            assert time.monotonic() < until, composed("server", "logs") + composed("north", "logs")
            time.sleep(3)
        card = json.loads(found.stdout)
    finally:
        for who in ("server", *SITES):
            composed(who, "down", "-v")
    assert card["method"] == "afl"
