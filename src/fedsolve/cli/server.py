"""`fedsolve server`: wait for sites, train over them, leave model and report."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fedsolve.cli.command import Choice, option
from fedsolve.cli.doubts import caveats
from fedsolve.cli.keys import key_folder
from fedsolve.cli.method_options import MethodCommand, chosen_method, is_given, weighed
from fedsolve.cli.options import log_option, output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import (
    Interrupted,
    Output,
    begin_lines,
    check_target,
    facts,
    keep_lines,
    megabytes,
    percent,
)
from fedsolve.cli.run_options import cohort_options, sums_options, training_options
from fedsolve.cli.track_option import track_option, trackers
from fedsolve.cli.watched import status_option, watched_run
from fedsolve.data.lock import locked
from fedsolve.data.schema_file import read_schema
from fedsolve.errors import DataError
from fedsolve.federation.calibrated import Calibrated
from fedsolve.federation.engine import Wraps
from fedsolve.federation.followers import Follower
from fedsolve.federation.history import totals
from fedsolve.federation.method import Method, Record, unwrapped
from fedsolve.labels import spelled_labels
from fedsolve.network.keyfolder import private_folder
from fedsolve.watching.board import Board

if TYPE_CHECKING:
    from fedsolve.model import Model
    from fedsolve.network.running import State
    from fedsolve.network.validity import Validity

_NET = "The network"
_SITES = "The sites"
_RUN = "The run"
PORT = 9092
_SECURE = "SECURE SUMS: this server sees totals over all sites, and no site's own sums"
_PLAIN = "PLAIN: this server sees the sums of every site by itself"


@click.command(
    cls=MethodCommand,
    details="Sums are secure: the server sees totals over all sites, no site's own, and a run keeps the "
    "sites it began with. With --plain it sees every site's sums (Gram and cross matrices), not its rows. "
    "See the threat model in the documentation for what either reveals.",
    examples=(
        (
            "wait for three sites, train DeepAFL with three layers, save the model",
            "fedsolve server --keys keys --clients 3 --classes cat,dog --layers 3 --out model.safetensors",
        ),
        (
            "the same with a file; run it again to go on after a crash",
            "fedsolve server --config federation.toml",
        ),
        (
            "tables with categories, dates or missing values: all sites have the same schema",
            "fedsolve server --keys keys --clients 3 --schema schema.toml --out model.safetensors",
        ),
        (
            "try it on this machine alone, without keys",
            "fedsolve server --insecure --plain --listen 127.0.0.1:9092 --clients 2 --classes 0,1",
        ),
    ),
)
@option(
    "--listen",
    metavar="HOST:PORT",
    default=f"0.0.0.0:{PORT}",
    group=_NET,
    help="Where sites connect; nothing else is open.",
)
@sums_options(_NET)
@option(
    "--insecure",
    is_flag=True,
    group=_NET,
    help="Neither TLS nor keys: whoever reaches the port takes part and reads all.",
)
@option("--clients", type=click.IntRange(1), required=True, group=_SITES, help="Sites to wait for.")
@cohort_options(_SITES)
@option(
    "--missing",
    more=True,
    type=Choice(["wait", "continue", "error"]),
    default="wait",
    group=_SITES,
    help="A site that is not there: wait for it, go on without it (exact for those present), or stop.",
)
@option(
    "--min-clients",
    more=True,
    type=click.IntRange(1),
    default=1,
    group=_SITES,
    help="Sites that must have answered an exchange.",
)
@option(
    "--patience",
    more=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    group=_SITES,
    help="How long to wait for an answer, until all of it is there.  [default: for ever]",
)
@option(
    "--gather",
    more=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=math.inf,
    show_default=False,
    group=_SITES,
    help="How long to wait for the sites at the beginning.  [default: for ever]",
)
@training_options(_RUN, "fedsolve-server")
@status_option(_RUN)
@option(
    "--device",
    more=True,
    metavar="NAME",
    default="cpu",
    group=_RUN,
    help="This server solves on cpu, torch:cpu, cuda, cuda:1, or auto: a GPU if any; sites have their own.",
)
@option(
    "--evaluate",
    is_flag=True,
    more=True,
    group=_RUN,
    help="One exchange more: accuracy on the sites' own rows.",
)
@option(
    "--calibrate",
    is_flag=True,
    more=True,
    group=_RUN,
    help="Calibrated probabilities: the training's exchanges twice, and two to four more.",
)
@track_option(_RUN, more=True)
@config_option
@log_option
@output_options
@click.pass_context
def server(ctx: click.Context, /, **given: Any) -> None:
    """Train one model over sites that keep their data.

    Starts what the network needs, waits until the sites are there, runs the method, and writes model and
    report into the state folder. Killed at any moment, it goes on where it was when started again with the
    same state folder, and the result is the same.
    """
    output = Output(given["as_json"], given["quiet"], given["log"])
    begin_lines("server", given["log"])
    method = chosen_method(ctx)
    given["classes"] = class_names(given["classes"])
    if given["schema"] is not None:
        take_schema(given)
    method = weighed(method, given["schema"], given["class_weight"])
    if given["calibrate"]:
        method = Calibrated(method)
    keys = _keys(ctx, given)
    check_secure(ctx, given, method)
    check_target(given["out"])
    tracked = ctx.with_resource(trackers(given["track"]))
    state = Path(given["state"])
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.perf_counter()
    try:
        private_folder(state)
        with locked(state / "lock", f"the state folder {state} is used"):
            keep_lines(state / "server.log", "server", given["log"])
            title = f"{unwrapped(method).key} over {given['clients']} sites"
            with watched_run(state, title, given["clients"], given["status"], output) as board:
                output = dataclasses.replace(output, heard=board.note)
                document = _run(given, output, method, state, keys, board, tracked)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"interrupted; {state} holds the last exchange. Run the same command to go on."
        ) from stop
    document["seconds"] = time.perf_counter() - started
    output.result(document, lambda page: show_run(page, document))
    for doubt in document["warnings"]:
        output.warn(doubt)


def _run(
    given: dict[str, Any],
    output: Output,
    method: Method[Any],
    state: Path,
    keys: Path | None,
    board: Board,
    tracked: Follower,
) -> dict[str, Any]:
    from fedsolve.federation.evaluation import evaluate
    from fedsolve.network import require_network
    from fedsolve.network.running import State, finished, run_method, say_over, say_over_late
    from fedsolve.network.service import serving

    require_network()
    certificates = _verify(keys, output, given)
    output.note(_PLAIN if given["plain"] else f"{_SECURE}. {_said_of_checks(given)}")
    held = State(state)
    model = finished(method, held, given["classes"], given["task"], given["clients"], given["schema"])
    accuracy = None
    if model is not None:
        board.complete()
        output.note(f"{state} holds this run complete; choose another --state to train again")
        if not held.over.exists():
            output.note("the sites were not told yet; telling those that are there")
            with serving(state, given["listen"], keys, output.note, output.log) as link:
                say_over_late(_federate(given, output, link), held)
    else:
        board.gathering(not given["plain"], certificates)
        output.note(f"starting; logs are in {state}")
        with serving(state, given["listen"], keys, output.note, output.log) as link:
            output.note(f"sites may connect to {given['listen']}")
            if held.checkpoint.exists():
                output.note(f"going on from {held.checkpoint}")
            federate = _federate(given, output, link, board)
            around = None if given["plain"] else secured(given, held)
            model, engine = run_method(
                method, federate, held, [ExchangeNotes(output), board, tracked], around
            )
            if given["evaluate"]:
                accuracy = evaluate(engine, model)
                for follower in (board, tracked):
                    follower.scored({"accuracy": accuracy})
            say_over(engine.federation if isinstance(engine, Wraps) else engine, held)  # type: ignore[arg-type]
            board.complete()
    if given["out"] is not None:
        model.save(given["out"])
    return run_document(method, model, held, accuracy, given["out"])


def run_document(
    method: Method[Any], model: Model, state: State, accuracy: float | None, out: str | None
) -> dict[str, Any]:
    """What is told of a run that is complete."""
    return {
        "method": unwrapped(method).key,
        "parameters": method.parameters(),
        "secure": bool(model.history) and all(record.error_bounds for record in model.history),
        "sites": list(model.history[-1].cohort) if model.history else [],
        **totals(model.history),
        "missing": {str(r.exchange): dict(r.missing) for r in model.history if r.missing},
        "accuracy": accuracy,
        "model": out or str(state.model),
        "report": str(state.report),
        "warnings": caveats(model),
    }


def _federate(given: dict[str, Any], output: Output, link: Any, board: Board | None = None) -> Any:
    """The federation over a link, as the options want it; the board asks it how its sites stand."""
    from fedsolve.federation.engine import Spec
    from fedsolve.network.flower import CohortReport, FlowerFederation

    def federate(spec: Spec | None, report: Callable[[CohortReport], None]) -> FlowerFederation:
        def heard(found: CohortReport) -> None:
            report(found)
            for name, why in found.missing.items():
                text = f"exchange {found.exchange + 1}: without '{name}': {why}"
                output.note(text, exchange=found.exchange + 1, site=name, why=why)

        federation = FlowerFederation(
            link,
            clients=given["clients"],
            classes=given["classes"],
            task=given["task"],
            missing=given["missing"],
            min_clients=given["min_clients"],
            patience=given["patience"],
            gather=given["gather"],
            schema=given["schema"],
            spec=spec,
            device=given["device"],
            secure=not given["plain"],
            report=heard,
            tell=output.note,
        )
        if board is not None:
            board.sites_from(federation.standings)
        return federation

    return federate


def secured(given: dict[str, Any], held: Any, lasting: bool = False) -> Any:
    """Secure sums around the engine that carries messages; lasting: whether what sites reply stays there."""
    from fedsolve.network.flower import CohortReport, FlowerFederation
    from fedsolve.privacy import SecureFederation

    def around(federation: FlowerFederation, heard: Callable[[CohortReport], None]) -> SecureFederation:
        goes_on = given["missing"] == "continue"
        return SecureFederation(
            federation,
            colluders=given["colluders"],
            missing="continue" if goes_on else "error",
            changing=goes_on,
            verify=not given["unverified"],
            signatures=given["signatures"],
            store=held.secure,
            lasting=lasting,
            report=heard,
        )

    return around


def _said_of_checks(given: dict[str, Any]) -> str:
    """Whether sites check what this server asks."""
    from fedsolve.privacy.notes import least_threshold, least_verified

    clients, least = given["clients"], least_verified(given["colluders"])
    if given["unverified"]:
        return (
            "NOT CHECKED: sites answer whatever this server asks (--unverified), if their policies allow it"
        )
    if clients < least:
        return f"NOT CHECKED: {clients} sites are too few to check what this server asks, {least} are needed"
    needed = given["signatures"] or least_threshold(clients, given["colluders"])
    return f"CHECKED: {needed} of {clients} sites check every question against the totals that were opened"


def check_secure(ctx: click.Context, given: dict[str, Any], method: Method[Any]) -> None:
    """Refuse, before anything starts, what cannot be done in secure sums."""
    if given["plain"]:
        return
    from fedsolve.federation.recipes import recipe
    from fedsolve.privacy.notes import LEAST_COHORT, least_verified

    if given["insecure"]:
        raise click.UsageError(
            "secure sums need keys, by which sites know each other; with --insecure give --plain too", ctx
        )
    if given["clients"] < LEAST_COHORT:
        raise click.UsageError(
            f"a secure sum takes {LEAST_COHORT} sites at least, since of two each would learn the other's "
            "part; for fewer give --plain, here and at the sites",
            ctx,
        )
    if not given["unverified"] and given["clients"] >= least_verified(given["colluders"]):
        recipe(method)  # refuses what sites cannot check
    if is_given(ctx, "seed"):
        raise click.UsageError("in secure sums the sites draw the seed together; leave --seed out", ctx)
    inner = unwrapped(method)
    if inner.gathers:
        raise click.UsageError(
            f"method '{inner.key}' gathers: its server needs every site's answer by itself, which secure "
            "sums hide; choose another ('fedsolve methods'), or give --plain, here and at the sites",
            ctx,
        )


class ExchangeNotes(Follower):
    """One line on stderr for every exchange."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def advanced(self, record: Record, expected: int) -> None:
        self._output.note(
            f"exchange {record.exchange + 1} of {max(expected, record.exchange + 1)} ({record.kind}): "
            f"{len(record.cohort)} sites, {megabytes(record.bytes_up)} MB up, {record.seconds:.1f} s",
            exchange=record.exchange + 1,
            of=max(expected, record.exchange + 1),
            kind=record.kind,
            sites=list(record.cohort),
            missing=dict(record.missing),
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            seconds=record.seconds,
            risk=record.risk,
        )


def class_names(text: str | None) -> list[Any] | None:
    """A class list given in one word, in the types that the labels of a csv file would have."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        raise DataError(f"--classes names {len(names)} class(es): {text!r}. Give two at least: a,b,c.")
    classes: list[Any] = spelled_labels(names).tolist()
    return classes


def take_schema(given: dict[str, Any]) -> None:
    """The schema that --schema names, and its classes, become those of the run."""
    schema = given["schema"] = read_schema(given["schema"])
    if given["task"] == "classification" and schema.classes:
        if given["classes"] is not None and set(given["classes"]) != set(schema.classes):
            raise DataError("--classes are not the classes of --schema; leave --classes out.")
        given["classes"] = list(schema.classes)


def _keys(ctx: click.Context, given: dict[str, Any]) -> Path | None:
    if given["insecure"]:
        if given["keys"] is not None:
            raise click.UsageError("--insecure uses no keys; leave out one of --keys and --insecure", ctx)
        return None
    return Path(key_folder(given["keys"]))


def _verify(keys: Path | None, output: Output, given: dict[str, Any]) -> list[Validity]:
    """Refuse keys that a server cannot start with; gives its certificates, and tells of those that expire."""
    if keys is None:
        output.note(
            f"INSECURE: whoever reaches {given['listen']} can take part and read everything. "
            "Use keys ('fedsolve keys') for anything but a trial."
        )
        return []
    from fedsolve.network import validity
    from fedsolve.network.keyfolder import Keys
    from fedsolve.network.security import verify_server

    verify_server(Keys(keys))
    certificates = validity.of_server(Keys(keys))
    for one in certificates:
        if text := one.announced:
            output.warn(text, certificate=one.name, days=one.days)
    return certificates


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def show_run(page: Console, told: dict[str, Any]) -> None:
    lines = [
        ("method", told["method"]),
        ("sums", "secure" if told["secure"] else "plain"),
        ("sites", ", ".join(told["sites"])),
        ("exchanges", f"{told['exchanges']} in {told['seconds']:.1f} s"),
        ("traffic", f"{megabytes(told['bytes_up'])} MB up, {megabytes(told['bytes_down'])} MB down"),
    ]
    if told["catch_up_bytes"]:
        lines.append(("", f"{megabytes(told['catch_up_bytes'])} MB down to catch up"))
    for exchange, missing in told["missing"].items():
        lines.append(("missing", f"exchange {int(exchange) + 1}: {', '.join(missing)}"))
    if told["accuracy"] is not None:
        lines.append(("accuracy", f"{percent(told['accuracy'])} on the sites' rows"))
    lines += [("model", told["model"]), ("report", told["report"])]
    facts(page, lines)
