"""A site in one process: fetches messages from the gate of its server and answers with a participant.

One thread keeps the connection and waits for messages, which shows the server that this site is there while
another computes. The site opens no port, and runs nothing but the fedsolve that is installed here.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsolve.arrays import Array
from fedsolve.errors import CohortError, DataError
from fedsolve.network import gate_client, require_network
from fedsolve.network.answering import Answerer
from fedsolve.network.calls import OTHER_WIRE, REPLACED, UNREGISTERED, UNWANTED
from fedsolve.network.certificates import RENEW, Validity
from fedsolve.network.gate_client import GateClient, Refused
from fedsolve.network.parcels import LARGEST, Note, Parcel
from fedsolve.network.proposing import Proposing
from fedsolve.network.security import site_key

_log = logging.getLogger("fedsolve")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0

_Message = tuple[str, Note, Array]


@dataclass(frozen=True)
class Connection:
    """Where the server is, and what proves who we are.

    address: HOST:PORT. authority: file of the certificate authority; None only together with `insecure`.
    key:     file of this site's private key; without one the node registers itself, which only an
             insecure server allows.
    """

    address: str
    authority: Path | None = None
    key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.insecure and (self.authority is not None or self.key is not None):
            raise DataError("keys are of no use without TLS: leave out the keys, or --insecure.")
        if not self.insecure and self.authority is None:
            raise DataError("a secure connection needs the authority's certificate (ca.crt).")


class SiteNode:
    """Connects, answers until stopped, and connects again when the server was away."""

    def __init__(
        self,
        answerer: Answerer | Proposing,
        connection: Connection,
        *,
        tell: Callable[[str], None] | None = None,
        connected: Callable[[Validity | None], None] | None = None,
        largest: int = LARGEST,
    ) -> None:
        """connected: called with the server's certificate when a connection was made."""
        require_network()
        self._answerer, self._connection, self._largest = answerer, connection, largest
        self._connected, self._tell = connected or (lambda shown: None), tell or (lambda text: None)
        self._stopped = threading.Event()
        self._key = None if connection.key is None else site_key(connection.key)
        self._process = secrets.token_hex(16)
        self._held: set[str] = set()
        self._come: queue.SimpleQueue[_Message | Exception | None] = queue.SimpleQueue()

    def stop(self) -> None:
        """End after the answer under way; safe to call from a signal handler or another thread."""
        self._stopped.set()
        self._come.put(None)

    def serve(self, once: bool = False) -> None:
        """Answer until stopped. once: raise instead of trying again when the server cannot be reached."""
        client = self._client()
        threading.Thread(target=self._stay, args=(client, once), daemon=True, name="fedsolve-pull").start()
        try:
            while not self._stopped.is_set():
                found = self._come.get()
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    self._try_answer(client, *found)
        finally:
            self._stopped.set()
            with suppress(Exception):  # the server will notice by itself
                client.leave()
            client.close()

    def _client(self) -> GateClient:
        authority = self._connection.authority
        # Without keys a site is known by its name, also when it starts anew.
        site = "" if self._key is not None else hashlib.sha256(self._answerer.name.encode()).hexdigest()[:32]
        return GateClient(self._connection.address, authority, self._key, site, self._process)

    # -- the thread that keeps the connection ----------------------------------------------------

    def _stay(self, client: GateClient, once: bool) -> None:
        """Be there: say hello, hand over the messages that come, and begin anew when the server was away."""
        pauses, announced = _pauses(), ""
        while not self._stopped.is_set():
            try:
                client.hello()
                self._tell(f"connected to {self._connection.address}")
                if text := gate_client.clocks_apart(client.clock):
                    self._tell(f"warning: {text}")
                self._connected(client.certificate)
                pauses, announced = _pauses(), ""
                self._fetch(client)
            except Exception as problem:
                told = self._explained(problem)
                if once or not isinstance(told, _Lost):
                    self._come.put(told)
                    return
                if str(told) != announced and not self._stopped.is_set():
                    announced = str(told)
                    self._tell(f"{told} Trying again.")
                self._stopped.wait(next(pauses))

    def _fetch(self, client: GateClient) -> None:
        while not self._stopped.is_set():
            found = client.pull(sorted(self._held), self._largest)
            self._held -= client.dropped
            if found is not None:
                self._held.add(found[0])
                self._come.put(found)

    # -- the thread that answers -----------------------------------------------------------------

    def _try_answer(self, client: GateClient, message: str, note: Note, payload: Array) -> None:
        """Answer a message; one that nobody waits for any more is dropped."""
        if message not in self._held:
            return
        try:
            content, answer = self._answerer.reply(note, payload)
            self._bring(client, message, Parcel.of(content, answer))
            self._held.discard(message)
        except (_Refused, MemoryError):
            raise
        except Exception as problem:  # it stays among those we have, and is not handed over once more
            _log.exception("a message could not be answered")
            self._tell(f"a message could not be answered ({type(problem).__name__}: {problem})")

    def _bring(self, client: GateClient, message: str, parcel: Parcel) -> None:
        """Bring an answer, again where the connection breaks; the other thread makes a new one."""
        for pause in _pauses():
            try:
                client.answer(message, parcel)
                return
            except Exception as problem:
                if isinstance(problem, Refused) and (problem.reason == UNWANTED or problem.status == 413):
                    self._tell(f"an answer is not wanted any more ({problem})")
                    return
                if not isinstance(told := self._explained(problem), _Lost):
                    raise told from None
            if message not in self._held:
                # Of a large answer that is refused, the connection breaks before the refusal is heard.
                self._tell("an answer is not wanted any more")
                return
            if self._stopped.wait(pause):
                return

    def _explained(self, problem: Exception) -> Exception:
        """The problem as one that a person understands: worth trying again (`_Lost`), or not."""
        import httpx

        address = self._connection.address
        if isinstance(problem, Refused):
            if problem.reason in (OTHER_WIRE, REPLACED, UNREGISTERED):  # trying again mends none of these
                return _Refused(f"{address} refuses this node: {problem}")
            return _Lost(f"{address} answered {problem.status}: {problem}")
        if isinstance(problem, httpx.ConnectError) and "certificate" in str(problem).lower():
            what = gate_client.remedy(str(problem), address, self._connection.authority, self._key)
            words = f"{address} does not prove that it is the server ({problem}). {what}"
            # A certificate that has expired is renewed over there, a clock set right: no need to start again.
            mended = what == RENEW or what.endswith(gate_client.SET_CLOCK)
            return _Lost(words) if mended else _Refused(words)
        if self._key is not None and isinstance(problem, httpx.RemoteProtocolError | httpx.ReadError):
            return _Lost(
                f"{address} closed the connection ({problem}). If this goes on, this site's key is not "
                "registered there: fedsolve keys register NAME.pub."
            )
        if isinstance(problem, httpx.HTTPError | OSError):
            return _Lost(f"{address} cannot be reached ({type(problem).__name__}: {problem}).")
        return problem


def _pauses() -> Iterator[float]:
    """Seconds to wait before trying again: longer each time, up to some seconds."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE, pause * 1.5)


class _Lost(CohortError):
    """The connection is gone or was not there; worth trying again."""


class _Refused(CohortError):
    """The server refuses us; trying again does not help."""
