"""`fedsolve server`: wait for sites, train over them, leave model and report."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fedsolve.cli.method_options import MethodCommand
from fedsolve.cli.model_options import DeviceOptions
from fedsolve.cli.options import command, option, rare, required
from fedsolve.cli.output import Interrupted, LoggedOutput, Output, check_target
from fedsolve.cli.run_options import SITES, RunOptions
from fedsolve.cli.watched import TrackerOptions, watched_run
from fedsolve.errors import CohortError
from fedsolve.federation.card import totals
from fedsolve.federation.engine import Follower, hears
from fedsolve.federation.method import Record
from fedsolve.federation.recipe import Recipe
from fedsolve.network.keyfolder import Keys, state_folder
from fedsolve.pages.words import known, listed, megabytes, percent, traffic_words
from fedsolve.scoring.evaluation import caveats
from fedsolve.statistics.results import StatisticModel
from fedsolve.tables.schema import Schema, write_schema
from fedsolve.watching.board import Board
from fedsolve.watching.log_lines import begin_lines, keep_lines

if TYPE_CHECKING:
    from fedsolve.federation.engine import Federation
    from fedsolve.model import Model
    from fedsolve.network.certificates import Validity
    from fedsolve.network.network_federation import CohortReport, NetworkFederation
    from fedsolve.network.running import State
    from fedsolve.privacy import SecureFederation

_NET = "The network"
PORT = 9092
_SECURE = "SECURE SUMS: this server sees totals over all sites, and no site's own sums"
_PLAIN = "PLAIN: this server sees the sums of every site by itself"


class ServerOptions(TrackerOptions, DeviceOptions, RunOptions):
    listen: str = option(
        f"0.0.0.0:{PORT}", "Where sites connect; nothing else is open.", "HOST:PORT", group=_NET
    )
    insecure: bool = option(
        False, "No TLS, no keys: anyone who reaches the port can take part and read all.", group=_NET
    )
    engine: Literal["mailbox", "flower"] = rare(
        "mailbox", "What carries the messages: our own mailbox, or Flower.", group=_NET
    )
    superlink: str | None = rare(
        None, "Flower: name of its SuperLink.", "NAME", none="Flower's default", group=_NET
    )
    clients: int = required("Sites to wait for.", least=1, group=SITES)
    missing: Literal["wait", "continue", "error"] = rare(
        "wait", "If a site is missing: wait, continue without it, or stop.", group=SITES
    )
    min_clients: int = rare(1, "Sites that must have answered an exchange.", least=1, group=SITES)
    patience: float | None = rare(
        None, "Wait for an answer.", "SECONDS", above=0, none="for ever", group=SITES
    )
    gather: float | None = rare(
        None, "Wait for all to come.", "SECONDS", above=0, none="for ever", group=SITES
    )
    state: str = option("fedsolve-server")
    status: int | None = rare(
        None, "Page and metrics, on loopback; 0: any port.", "PORT", least=0, most=65535
    )
    evaluate: bool = rare(False, "Measure accuracy, or R², on the sites' rows, in one exchange.")

    @property
    def authority(self) -> Path | None:
        return None if self.engine == "flower" or self.insecure else self.key_folder.folder


@command(cls=MethodCommand, config=True)
def server(options: ServerOptions, output: LoggedOutput) -> None:
    """Train one model over sites that keep their data.

    Starts what the network needs, waits until the sites are there, runs the method, and writes model and
    report into the state folder. Killed at any moment, it goes on where it was when started again with the
    same state folder, and the result is the same.

    Details:
    Sums are secure: the server sees totals over all sites, no site's own, and a run keeps the sites it began
    with. With --plain it sees every site's sums (Gram and cross matrices), not its rows. See the threat model
    in the documentation for what either reveals.

    # wait for three sites, train the best closed form on rows held out, save the model
    fedsolve server --keys keys --clients 3 --classes cat,dog --out model.safetensors
    # the same with a file; run it again to go on after a crash
    fedsolve server --config federation.toml
    # tables with categories, dates or missing values: all sites have the same schema
    fedsolve server --keys keys --clients 3 --schema schema.toml --out model.safetensors
    # try it on this machine alone, without keys
    fedsolve server --insecure --plain --listen 127.0.0.1:9092 --clients 2 --classes 0,1
    """
    begin_lines("server", output.log)
    recipe = options.recipe(options.chosen(output), options.rows)
    options.check(recipe, options.clients)
    for written in (options.out, options.schema_out):
        check_target(written)
    tracked = options.followers()
    state = Path(options.state)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.engine == "flower" and click.get_current_context().obj is None:
        from fedsolve.cli.flower_apps import start_run

        start_run(options.superlink)  # which runs this very command beside the SuperLink
    started = time.perf_counter()
    try:
        with state_folder(state):
            keep_lines(state / "server.log", "server", output.log)
            title = f"{recipe.method.key} over {options.clients} sites"
            with watched_run(state, title, options.clients, options.status, output) as board:
                heard = dataclasses.replace(output, heard=board.note)
                document = _run(options, heard, recipe, board, tracked)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"interrupted; {state} holds the last exchange. Run the same command to go on."
        ) from stop
    document["seconds"] = time.perf_counter() - started
    output.result(document, run_lines(document))


def _run(
    options: ServerOptions, output: Output, recipe: Recipe[Any], board: Board, tracked: list[Follower]
) -> dict[str, Any]:
    from fedsolve.network import require_network
    from fedsolve.network.running import State, finished, run_method, say_over, say_over_late

    require_network()
    state, certificates = State(Path(options.state)), _verify(options, output)
    output.note(_PLAIN if options.plain else f"{_SECURE}. {_said_of_checks(options)}")
    waiting: dict[str, Any] = {
        "missing": options.missing,
        "min_clients": options.min_clients,
        "patience": options.patience,
        "gather": options.gather or math.inf,
        "device": options.device,
    }
    secure = None
    model = finished(
        recipe, state, options.class_names(), options.kind, options.clients, options.rows, options.evaluate
    )
    if model is not None:
        board.complete()
        output.note(f"{state.folder} holds this run complete; choose another --state to train again")
        if not state.over.exists():
            output.note("the sites were not told yet; telling those that are there")
            with _linked(options, output) as link:
                say_over_late(federated(options, output, link, options.clients, state, **waiting), state)
    else:
        board.gathering(not options.plain, certificates)
        output.note(f"starting; logs are in {state.folder}")
        with _linked(options, output) as link:
            if state.checkpoint.exists():
                output.note(f"going on from {state.checkpoint}")
            federation = federated(options, output, link, options.clients, state, **waiting)
            board.sites_from(federation.standings)
            secure = None if options.plain else secured(options, federation, state)
            follow, score = [*exchange_notes(output), board, *tracked], _score if options.evaluate else None
            model = run_method(recipe, secure or federation, state, follow, score)
            say_over(federation, state)
            board.complete()
    document = run_document(options, recipe, model, state)
    if secure is not None and secure.left_out is not None and model.schema is not None:
        document["left_out"] = [model.schema.names[place] for place in secure.left_out.nonzero()[0]]
    return document


def _score(engine: Federation, model: Model) -> dict[str, float]:
    from fedsolve.scoring.evaluation import evaluate

    return {"r2" if model.regression else "accuracy": evaluate(engine, model)}


@contextmanager
def _linked(options: ServerOptions, output: Output) -> Iterator[Any]:
    """The link to the sites: Flower's grid inside a Flower run, else a gate of this server's own."""
    from fedsolve.network.gate_link import serving

    state = Path(options.state)
    if options.engine == "flower":
        if (link := click.get_current_context().obj) is None:
            told = f"the run did not end; {state / 'server.log'} and Flower's own logs say why."
            raise CohortError(f"{told} Run the same command to go on.")
        yield link
        return
    with serving(state, options.listen, options.authority, output.note, output.log) as link:
        output.note(f"sites may connect to {options.listen}")
        yield link


def run_document(options: RunOptions, recipe: Recipe[Any], model: Model, state: State) -> dict[str, Any]:
    """Write what a complete run leaves where the options say; what is reported about it."""
    if options.out is not None:
        model.save(options.out)
    begun = state.begun()  # the model of a formula knows no column that it does not use
    schema = model.schema if begun is None or begun["rows"] is None else Schema.from_note(begun["rows"])
    if options.schema_out is not None and schema is not None:
        write_schema(schema, options.schema_out)
    tried: list[Any] = [one.as_dict() for one in model.tried]
    tried = next((r.metrics["tried"] for r in model.history if "tried" in r.metrics), tried)
    return {
        "method": recipe.method.key,
        "parameters": recipe.method.parameters(),
        "tried": tried,
        "secure": bool(model.history) and all(record.error_bounds for record in model.history),
        "sites": list(model.history[-1].cohort) if model.history else [],
        **totals(model.history),
        "missing": {str(r.exchange): dict(r.missing) for r in model.history if r.missing},
        "r2" if model.regression else "accuracy": None,
        **state.measured,
        "model": options.out or str(state.model),
        "report": str(state.report),
        "warnings": caveats(model),
        **({"result": model.document()} if isinstance(model, StatisticModel) else {}),
    }


def federated(
    options: RunOptions, output: Output, link: Any, clients: int, state: State, **settings: Any
) -> NetworkFederation:
    """The federation over a link, as the options want it; missing sites are noted.

    settings: of `NetworkFederation`, besides what the options say.
    """
    from fedsolve.network.network_federation import NetworkFederation

    def heard(found: CohortReport) -> None:
        state.enter(found)
        for name, why in found.missing.items():
            text = f"exchange {found.exchange + 1}: without '{name}': {why}"
            output.note(text, exchange=found.exchange + 1, site=name, why=why)

    return NetworkFederation(
        link,
        clients=clients,
        classes=options.class_names(),
        task=options.task if options.rows is None else options.kind,
        schema=options.rows,
        begun=state.begun(),
        secure=not options.plain,
        report=heard,
        tell=output.note,
        **settings,
    )


def secured(
    options: RunOptions, federation: NetworkFederation, state: State, lasting: bool = False
) -> SecureFederation:
    """Secure sums over the engine that carries messages. lasting: whether that keeps the sites' replies."""
    from fedsolve.privacy import SecureFederation

    goes_on = options.missing == "continue"
    return SecureFederation(
        federation,
        colluders=options.colluders,
        missing="continue" if goes_on else "error",
        changing=goes_on,
        verify=not options.unverified,
        signatures=options.signatures,
        store=state.secure,
        lasting=lasting,
        report=state.enter,
    )


def _said_of_checks(options: ServerOptions) -> str:
    from fedsolve.privacy.notes import least_verified, signatures_needed

    clients, least = options.clients, least_verified(options.colluders)
    if options.unverified:
        return (
            "NOT CHECKED: sites answer whatever this server asks (--unverified), if their policies allow it"
        )
    if clients < least:
        return f"REFUSED at the sites: {clients} are too few to check what this server asks; {least} can"
    needed = options.signatures or signatures_needed(clients, options.colluders)
    return f"CHECKED: {needed} of {clients} sites check every question against the totals that were opened"


def exchange_notes(output: Output) -> list[Follower]:
    """What says one line on stderr for every exchange."""

    def advanced(record: Record, expected: int) -> None:
        number = record.exchange + 1
        output.note(
            f"exchange {number} of {max(expected, number)} ({record.kind}): {len(record.cohort)} sites, "
            f"{megabytes(record.bytes_up)} MB up, {record.seconds:.1f} s",
            exchange=number,
            of=max(expected, number),
            kind=record.kind,
            sites=list(record.cohort),
            missing=dict(record.missing),
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            seconds=record.seconds,
            risk=record.risk,
        )

    return [hears("planned", output.note), hears("advanced", advanced)]


def _verify(options: ServerOptions, output: Output) -> list[Validity]:
    """Refuse keys that a server cannot start with; gives its certificates, and tells of those that expire."""
    if options.engine == "flower":
        output.note("FLOWER: its SuperLink and SuperNodes carry the messages, with Flower's TLS and keys")
        return []
    if (folder := options.authority) is None:
        output.note(
            f"INSECURE: whoever reaches {options.listen} can take part and read everything. "
            "Use keys ('fedsolve keys') for anything but a trial."
        )
        return []
    from fedsolve.network import diagnosis
    from fedsolve.network.certificates import of_authority, of_server

    keys = Keys(folder)
    diagnosis.verify(diagnosis.server_keys(keys))
    certificates = [of_server(keys), of_authority(keys)]
    for one in certificates:
        if text := one.announced:
            output.warn(text, certificate=one.name, days=one.days)
    return certificates


_FEW = "the same in all but few rows, or set by few alone"


def _choice_line(chosen: dict[str, Any], tried: list[dict[str, Any]]) -> tuple[str, str]:
    """Which candidate was the best, of how many; or why they were not compared."""
    if compared := sum(one["loss"] is not None for one in tried):
        return "chosen", f"{chosen['method']}, the best of {compared} on rows held out"
    return "not compared", f"{chosen['left_out']}; {chosen['method']} is taken"


def run_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("method", told["method"]),
        *(_choice_line(one, told["tried"]) for one in told["tried"] if one["chosen"]),
        ("sums", "secure" if told["secure"] else "plain"),
        ("sites", ", ".join(told["sites"])),
        ("left out", told.get("left_out") and f"{listed(told['left_out'], 12)}: {_FEW}"),
        ("exchanges", f"{told['exchanges']} in {told['seconds']:.1f} s"),
        ("traffic", traffic_words(told)),
        ("", told["catch_up_bytes"] and f"{megabytes(told['catch_up_bytes'])} MB down to catch up"),
        *(("missing", f"exchange {int(n) + 1}: {', '.join(names)}") for n, names in told["missing"].items()),
        ("R²", known(told.get("r2"), "{:.4f} on the sites' rows")),
        ("accuracy", known(told.get("accuracy"), lambda share: f"{percent(share)} on the sites' rows")),
        ("model", told["model"]),
        ("report", told["report"]),
        ("result", f"fedsolve info {told['model']}" if "result" in told else ""),
    ]
