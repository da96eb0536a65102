"""fedsolve inside Flower: `fedsolve server --engine flower`, and the apps of `flwr run`.

The server app is the command `fedsolve server` over Flower's grid, the client app what `fedsolve client` is
to a gate: the same options, in the same files. Flower starts a process for every message; what a site must
remember is in its state folder.

    flower-supernode ... --node-config 'config="/etc/fedsolve/site.toml"'      with a table [client]
    flwr run examples/flower SUPERLINK -c 'config="/etc/fedsolve/run.toml"'    with a table [server]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsolve.cli.options import command
from fedsolve.cli.output import LoggedOutput
from fedsolve.cli.site_side import SiteDataOptions, SiteOptions, answerer
from fedsolve.errors import DataError
from fedsolve.network.answering import Answerer
from fedsolve.network.flower import GridLink, record, unpack
from fedsolve.network.keyfolder import state_folder
from fedsolve.network.proposing import Proposing

server = ServerApp()
client = ClientApp()

WAIT = 60.0
"""Seconds for which a process waits until another one that answers for the same site has ended."""

_until_the_end = ExitStack()
"""The lock of a state folder: what a process has read there stays true while it answers."""

_APP = """[project]
name = "fedsolve-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedsolve"
[tool.flwr.app.components]
serverapp = "fedsolve.cli.flower_apps:server"
clientapp = "fedsolve.cli.flower_apps:client"
[tool.flwr.app.config]
config = ""
words = {words}
folder = {folder}
"""


def start_run(superlink: str | None) -> None:
    """Have a SuperLink run this very command, and wait until it ends; Flower says what happens meanwhile."""
    flwr = shutil.which("flwr", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if flwr is None:
        raise DataError("the command 'flwr' is missing: pip install 'fedsolve[flower]'.")
    with tempfile.TemporaryDirectory(prefix="fedsolve-flower-") as folder:
        words, here = json.dumps(json.dumps(sys.argv[1:])), json.dumps(str(Path.cwd()))
        (Path(folder) / "pyproject.toml").write_text(_APP.format(words=words, folder=here))
        line = [flwr, "run", folder, *([] if superlink is None else [superlink]), "--stream"]
        subprocess.run(line, stdout=sys.stderr, check=False)


@server.main()  # type: ignore[misc, untyped-decorator, unused-ignore]
def main(grid: Any, context: Any) -> None:
    """Be `fedsolve server` over this grid."""
    from fedsolve.cli.main import main as fedsolve

    config = context.run_config
    if config.get("folder"):
        os.chdir(str(config["folder"]))
    words = json.loads(str(config.get("words") or "[]")) or ["server", "--config", str(config["config"])]
    try:  # the last word counts, whatever the file says
        fedsolve.main([*words, "--engine", "flower"], obj=GridLink(grid))
    except SystemExit as end:
        if end.code:
            raise DataError(f"the run has stopped (exit code {end.code}); the lines above say why.") from end


@command("client", config=True)
def site_of(site: SiteOptions, rows: SiteDataOptions, output: LoggedOutput) -> Answerer | Proposing:
    """What answers for the site that a file describes."""
    _until_the_end.enter_context(state_folder(site.folder, WAIT))
    return answerer(site, rows, output, state=site.folder)[0]


@cache
def _site(config: str) -> Answerer | Proposing:
    made: Answerer | Proposing = site_of.main(["--config", config], standalone_mode=False)
    return made


@client.query()  # type: ignore[misc, untyped-decorator, unused-ignore]
def query(message: Any, context: Any) -> Any:
    config = str(context.node_config.get("config", ""))
    if not config:
        raise DataError("this node has no data: --node-config 'config=\"/etc/fedsolve/site.toml\"'.")
    note, answer = _site(config).reply(*unpack(message.content))
    return Message(record(note, answer), reply_to=message)
