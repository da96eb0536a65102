"""A SuperLink of our own, and a run on it whose server side is this process.

Flower would start the server side of a run in a process of its own, from a bundle of code. Here the
SuperLink runs in `process` isolation, nothing takes its tasks but us, and a method runs where it was
called: with its progress, its errors and its exit code.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedsolve import log_lines
from fedsolve.errors import CohortError
from fedsolve.log_lines import Style
from fedsolve.network import QUIET, require_flower

_PACKAGE = "fedsolve.network"
_GUARDED = f"{_PACKAGE}.guarded"
_APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "fedsolve-run"
version = "1.0.0"
description = "fedsolve, as installed at both ends"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedsolve"
[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"
[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class Tls:
    """Files of the server's certificate; the same for the SuperLink and for what stands before it."""

    authority: Path
    certificate: Path
    key: Path


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SuperLink:
    """A SuperLink as a child process on 127.0.0.1; it ends with this process, however that ends."""

    def __init__(
        self, folder: Path, port: int | None = None, tls: Tls | None = None, style: Style = "text"
    ) -> None:
        """style: of its log."""
        require_flower()
        self._style = style
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.tls = tls
        self.log = folder / "superlink.log"
        self._folder = folder
        self.secret = secrets.token_hex(32).encode()  # for its tasks and its control interface
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, seconds: float = 90.0) -> None:
        """Start and wait until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        secret = self._folder / "task-secret"
        secret.unlink(missing_ok=True)
        with open(os.open(secret, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(self.secret)
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--isolation", "process"]
        words += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
        if self.tls is None:
            words.append("--insecure")
        else:
            words += ["--ssl-ca-certfile", str(self.tls.authority), "--ssl-keyfile", str(self.tls.key)]
            words += ["--ssl-certfile", str(self.tls.certificate), "--enable-supernode-auth"]
        environment = {**os.environ, **QUIET, **log_lines.for_child(self._style, self.log)}
        environment["FLWR_HOME"] = str(self._folder / "flower")
        with begin_log(self.log, self._style) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _GUARDED, str(os.getpid()), str(secret), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            self._wait(seconds)
        except BaseException:
            self.stop()
            raise

    def _wait(self, seconds: float) -> None:
        import httpx

        until = time.monotonic() + seconds
        verify: Any = str(self.tls.authority) if self.tls is not None else True
        url = f"{'http' if self.tls is None else 'https'}://{self.address}/health"
        with httpx.Client(verify=_context(verify)) as client:
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise CohortError(
                        f"the SuperLink ended at once (exit code {self._process.returncode}); "
                        f"{self.log} says why: {last_line(self.log)}"
                    )
                try:
                    if client.get(url).status_code == 200:
                        return
                except httpx.TransportError as problem:
                    if time.monotonic() > until:
                        raise CohortError(
                            f"the SuperLink does not answer on {self.address} ({problem}); see {self.log}."
                        ) from problem
                time.sleep(0.1)

    def check(self) -> None:
        """Raise if it has ended."""
        check_running(self._process, "the SuperLink", self.log)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> SuperLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- a run -----------------------------------------------------------------------------------

    def control(self) -> Any:
        """A client of the Control API; close it after use."""
        from flwr.supercore.control.control_http_client import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        from fedsolve.network.guarded import Bearer

        return ControlHttpClient.from_server_address(
            self.address,
            self.tls is None,
            self._authority(),
            [RuntimeVersionHttpInterceptor("flwr CLI"), Bearer(self.secret)],
        )

    @contextmanager
    def run(self) -> Iterator[Any]:
        """A grid over the nodes of this SuperLink, for as long as the context lasts."""
        import httpx
        from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
        from flwr.supercore.task_identity import TaskIdentity

        with self.control() as control:
            started = control.StartRun(start_request(_PACKAGE))
        if not started.HasField("run_id"):
            raise CohortError(f"the SuperLink started no run; see {self.log}.")
        grid = _Grid(self.address, self.tls is None, self._authority(), token=self._take_task())
        client = grid._runtime_client
        stop = threading.Event()
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.take_run(task.run)
            beats = threading.Thread(target=_beat, args=(client, stop), daemon=True)
            beats.start()
            status = "failed"
            try:
                yield grid
                status = "completed"
            finally:
                stop.set()
                with suppress(httpx.HTTPError):  # a SuperLink that is gone has heard enough
                    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        finally:
            stop.set()
            grid.close()

    def _take_task(self) -> str:
        """The token with which this process acts as the server side of the run."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        signed = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"}
        )
        with RuntimeHttpClient.from_server_address(
            self.address,
            self.tls is None,
            self._authority(),
            [RuntimeVersionHttpInterceptor("SuperExec"), signed],
        ) as client:
            task = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        if not task.token:
            raise CohortError(f"the SuperLink has no task for this process; see {self.log}.")
        return str(task.token)

    def _authority(self) -> bytes | None:
        return None if self.tls is None else self.tls.authority.read_bytes()


def _Grid(*words: Any, **names: Any) -> Any:
    """Flower's HTTP grid, without its habit of ending the process when a call is refused."""
    from flwr.common.serde import run_from_proto
    from flwr.superlink.grid import HttpGrid

    class Grid(HttpGrid):  # type: ignore[misc]
        def __init__(self, *words: Any, **names: Any) -> None:
            super().__init__(*words, **names)
            self._retry_invoker = None

        def take_run(self, run: Any) -> None:
            self.set_run(run_from_proto(run))

    return Grid(*words, **names)


def start_request(package: str, files: Mapping[str, bytes] | None = None) -> Any:
    """The request for a run of the apps in a package; `files` hold it where it is not installed."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    about = _APP.format(package=package).encode()
    bundle, _ = build_fab_from_files({"pyproject.toml": about, **(files or {})})
    fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
    return StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({}), federation="")


def _beat(client: Any, stop: threading.Event) -> None:
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    while not stop.wait(10):
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except Exception:
            continue  # the calls of the engine itself tell what is wrong


def _context(verify: Any) -> Any:
    import ssl

    return ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify


def check_running(process: subprocess.Popen[bytes] | None, what: str, log: Path) -> None:
    """Raise if a process that the network needs has ended, with the last line of its log."""
    if process is not None and process.poll() is not None:
        raise CohortError(
            f"{what} has ended (exit code {process.returncode}): {last_line(log)} (Log: {log}.) "
            "Start again with the same state folder to go on."
        )


_STARTED = "== the process starts"


def begin_log(path: Path, style: Style = "text") -> BinaryIO:
    """The log of a process that is being started, which says so first: what stands before is another's."""
    with suppress(OSError):
        if path.stat().st_size > log_lines.MOST:
            path.replace(path.with_name(f"{path.name}.1"))
    stream = open(path, "ab")  # noqa: SIM115
    stream.write(f"{log_lines.line(style, path.stem, 'INFO', _STARTED)}\n".encode())
    stream.flush()
    return stream


def last_line(path: Path) -> str:
    """The last line that the newest process wrote to its log."""
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = log_lines.message_of(lines[-1].strip()) if lines else _STARTED
    return "its log is empty." if last.endswith(_STARTED) else last
