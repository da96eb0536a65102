"""Flower's own commands: `flower-superlink`, four `flower-supernode`s and `flwr run` with our apps."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.network.keyfolder import Keys
from fedsolve.network.security import registered
from tests.flower_security.processes import QUIET, answers, free_ports, program, running

from .sites import CLASSES, NAMES, TOLERANCE, Sites

pytestmark = [pytest.mark.flower, pytest.mark.slow]

APP = Path(fs.__file__).parent / "network/app"
PATIENCE = 300.0


def node_config(**settings: object) -> str:
    return " ".join(f'{name}="{value}"' for name, value in settings.items())


def register_sites(server: str, keys: Keys) -> None:
    """Tell a SuperLink of every site, as `flwr supernode register` does."""
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

    with ControlHttpClient.from_server_address(
        server,
        insecure=False,
        root_certificates=keys.authority.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    ) as client:
        for site in registered(keys).values():
            client.RegisterNode(RegisterNodeRequest(public_key=site.pem, name=site.name))


def test_flwr_run_gives_the_same_model(sites: Sites, keys, tmp_path, monkeypatch):
    # Flower asks for new tasks once a second unless told otherwise.
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # The commands it starts are looked for on the path.
    monkeypatch.setenv("PATH", f"{Path(program('python')).parent}{os.pathsep}{os.environ['PATH']}")
    ports = free_ports(5)
    server, state = f"127.0.0.1:{ports[0]}", tmp_path / "state"
    superlink = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(ports[0])]
    superlink += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.server_certificate)]
    superlink += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
    superlink += ["--disable-runtime-dependency-installation"]
    with ExitStack() as stack:
        up = answers(f"https://{server}/health", keys.authority)
        stack.enter_context(running(superlink, tmp_path / "superlink.log", up, home=tmp_path))
        register_sites(server, keys)
        for name, port in zip(NAMES, ports[1:], strict=True):
            features, labels = tmp_path / f"x-{name}.npy", tmp_path / f"y-{name}.npy"
            np.save(features, sites.data.features[sites.rows(name)])
            np.save(labels, sites.data.labels[sites.rows(name)])
            node = [program("flower-supernode"), "--root-certificates", str(keys.authority)]
            node += ["--auth-supernode-private-key", str(keys.client_key(name)), "--superlink", server]
            node += ["--host", "127.0.0.1", "--port", str(port)]
            settings = {"name": name, "features": features, "labels": labels, "state": tmp_path / name}
            node += ["--node-config", node_config(**settings)]
            stack.enter_context(running(node, tmp_path / f"{name}.log", home=tmp_path / f"home-{name}"))
        home = tmp_path / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{server}"\n'
            f'root-certificates = "{keys.authority}"\n'
        )
        (tmp_path / "run.toml").write_text(
            f'clients = 4\nstate = "{state}"\nclasses = "{CLASSES}"\n'
            'parameters = \'{"layers": 3, "width": 64}\'\n'
        )
        run = subprocess.run(
            [program("flwr"), "run", str(APP), "here", "--stream", "-c", str(tmp_path / "run.toml")],
            env=os.environ | QUIET | {"FLWR_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            check=False,
        )
        logs = "".join((tmp_path / f"{name}.log").read_text()[-2000:] for name in NAMES)
        assert (state / "model.safetensors").exists(), run.stdout.decode() + logs
    model = fs.load_model(state / "model.safetensors")
    expected = fs.DeepAFL(layers=3, width=64, exchange="single").fit(sites.local())
    found, wanted = model.contents()[0], expected.contents()[0]
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=TOLERANCE * np.abs(array).max())
