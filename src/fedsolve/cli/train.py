"""`fedsolve train`: from a data file to a model file, over simulated clients."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fedsolve.backends.devices import check_name, resolve
from fedsolve.cli import pixel_rows
from fedsolve.cli.clients import DIVIDING, Division, client_options, federate, split_from
from fedsolve.cli.command import Choice, option
from fedsolve.cli.doubts import (
    check_finite,
)
from fedsolve.cli.inputs import Reader, row_options
from fedsolve.cli.method_options import (
    MethodCommand,
    chosen_method,
    class_weight_option,
    focused_option,
    is_gradient,
    method_option,
    preset_option,
    weighed,
)
from fedsolve.cli.options import READING, output_options
from fedsolve.cli.output import Interrupted, Output, check_target, percent
from fedsolve.cli.own_models import (
    personal_files,
    personal_folder,
    personal_keys,
    personalise,
    warn_of_few_rows,
)
from fedsolve.cli.track_option import track_option, trackers
from fedsolve.cli.train_report import (
    counts_of,
    doubts_about,
    held_out_accuracy,
    rounds_of,
    settings_of,
    show_training,
    traffic_of,
)
from fedsolve.cli.watched import watch_option, watched_page
from fedsolve.data.schema_file import read_schema
from fedsolve.data.tables import Table
from fedsolve.errors import ModelFileError
from fedsolve.federation.calibrated import Calibrated
from fedsolve.federation.card import card, training_card
from fedsolve.federation.engine import Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method, Record
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.watch import Watch
from fedsolve.model import Model
from fedsolve.schema import Schema

if TYPE_CHECKING:
    from fedsolve.cluster.ray_federation import RayFederation
    from fedsolve.privacy.secure import SecureFederation

    Engine = LocalFederation | SecureFederation | RayFederation

_GROUP = "Training"


_HELP = """Train a classifier over simulated clients.

DATA is a file (npz, csv, parquet), several files, one for each client, or the address of a dataset, such as
digits or folder:./images ('fedsolve datasets'). Closed-form methods solve for the model exactly, whatever the
partition; gradient methods need fedsolve[torch]. 'fedsolve train --method NAME --help' shows the parameters
of NAME, --help-all everything.
"""
_DETAILS = """
An npz holds the arrays x and y, or x_train, y_train, x_test and y_test; features are decoded as
offset + scale * x where it has these arrays. Parquet needs fedsolve[tables]. Images are turned into features
by --backbone, once.

Rows are dealt to clients by a partition, or by a column that names their owner. Of closed-form methods only
sums leave a client, and the model that all of them get does not depend on the partition. Gradient methods
train a head on the features or a whole network on the images, round by round.
"""


@click.command(
    cls=MethodCommand,
    unnamed="auto",
    help=_HELP,
    details=_DETAILS,
    examples=(
        (
            "DeepAFL over 20 clients with very uneven classes",
            "fedsolve train data.npz --partition dirichlet --alpha 0.1 --layers 10 --out model.safetensors",
        ),
        (
            "AFL, in one exchange, on a csv whose column 'hospital' says who owns each row",
            "fedsolve train patients.csv --method afl --label diagnosis --client-column hospital --out model",
        ),
        (
            "a raw table with categories, dates and missing values, by a schema that you reviewed",
            "fedsolve schema patients.csv --label diagnosis --client-column hospital --out schema.toml\n"
            "fedsolve train patients.csv --schema schema.toml --out model.safetensors",
        ),
        (
            "one file from each hospital; their columns may be in any order",
            "fedsolve train north.csv south.csv --label diagnosis --out model.safetensors",
        ),
        (
            "a model of its own for every client, balanced by the client itself",
            "fedsolve train data.npz --method apfl --balance auto --partition dirichlet \\\n"
            "    --out shared.safetensors --personal clients",
        ),
        (
            "your own images, in one folder per class, as features of a pre-trained backbone",
            "fedsolve train folder:./images --clients 5 --out model.safetensors",
        ),
        (
            "a long run that can be stopped and continued with the same line",
            "fedsolve train data.npz --layers 50 --checkpoint run.ckpt --resume --out model.safetensors",
        ),
        (
            "a gradient method to compare with: FedProx on a shallow head, with feedback alignment",
            "fedsolve train data.npz --method fedprox --network mlp:64 --rounds 50 \\\n"
            "    --feedback-alignment lowest --out model.safetensors",
        ),
        (
            "a whole network on images; what FedProx takes, and nothing else",
            "fedsolve train fashion-mnist --data-root DIR --method fedavg --network mobilenet_v2\n"
            "fedsolve train --method fedprox --help",
        ),
    ),
)
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@method_option(_GROUP, "auto")
@preset_option(_GROUP)
@option("--out", metavar="FILE", group=_GROUP, help="Where to save the model (.safetensors).")
@option(
    "--test",
    metavar="DATA",
    group=_GROUP,
    help="Rows to evaluate on after training.  [default: the data's test part]",
)
@focused_option(
    "--personal",
    applies=lambda key: key in personal_keys(),
    metavar="DIR",
    group=_GROUP,
    help="Folder for each client's own model, CLIENT.safetensors; stands for the clients' own disks.",
)
@option(
    "--workers",
    type=int,
    group=_GROUP,
    more=True,
    help="Clients computed at the same time.  [default: all cores]",
)
@option(
    "--device",
    more=True,
    metavar="NAME",
    default="cpu",
    group=_GROUP,
    help="Where to compute: cpu, torch:cpu, cuda, cuda:1, or auto: a GPU if any.",
)
@option(
    "--engine",
    type=Choice(["local", "ray"]),
    default="local",
    group=_GROUP,
    more=True,
    help="local: threads here; ray: workers in Ray, on the cluster of RAY_ADDRESS or started here "
    "(needs fedsolve[ray]).",
)
@option(
    "--secure",
    is_flag=True,
    group=_GROUP,
    help="Sum in secret: only totals are seen (needs fedsolve[privacy]).",
)
@option(
    "--calibrate/--no-calibrate",
    default=None,
    group=_GROUP,
    more=True,
    help="Probabilities calibrated on rows held out: trains twice.  [default: closed-form methods do]",
)
@class_weight_option(_GROUP, more=False)
@option("--checkpoint", metavar="FILE", group=_GROUP, help="Save the state after every exchange.")
@option("--resume", is_flag=True, group=_GROUP, help="Continue from --checkpoint if that file exists.")
@watch_option(_GROUP)
@focused_option(
    "--evaluate-every",
    applies=is_gradient,
    type=click.IntRange(1),
    metavar="N",
    group=_GROUP,
    help="Gradient methods: evaluate on the test rows every N rounds too.",
)
@track_option(_GROUP, more=True)
@option(
    "--schema",
    metavar="FILE",
    group=READING,
    help="What the columns are, as 'fedsolve schema' proposes it: categories, dates and missing values "
    "are prepared by sums over all clients.",
)
@client_options
@row_options
@output_options
@click.pass_context
def train(ctx: click.Context, /, **given: Any) -> None:
    """Train a classifier over simulated clients; `_HELP` is the page."""
    output = Output(given["as_json"], given["quiet"])
    files: tuple[str, ...] = given["data"]
    given["data"] = files[0]
    inputs = (*files, given["test"], given["schema"])
    for written in (given["out"], given["checkpoint"]):
        check_target(written, *inputs, root=given["root"])
    given["schema"] = described = _schema(ctx, given)
    split = split_from(ctx, given) if len(files) == 1 else _one_each(ctx, given)
    method = chosen_method(ctx)
    checkpoint = _checkpoint(ctx, given, output)
    if isinstance(method, GradientMethod):
        pixel_rows.check_torch(method.network, f"method '{method.key}'")
        method, given["backbone"] = pixel_rows.for_training(method, given)
    elif given["evaluate_every"] is not None:
        raise click.UsageError(
            f"--evaluate-every counts rounds of gradient methods; {method.key} has none", ctx
        )
    on_ray = given["engine"] == "ray"
    # Workers in Ray check for themselves whether they have it: this machine needs no GPU for theirs.
    given["device"] = (check_name if on_ray else resolve)(given["device"])
    personal = personal_folder(ctx, given["personal"], method)
    if on_ray and (given["secure"] or method.key in personal_keys()):
        what = "--secure" if given["secure"] else f"method '{method.key}', whose clients keep models,"
        raise click.UsageError(f"{what} needs --engine local", ctx)

    tracked = ctx.with_resource(trackers(given["track"]))
    reader = Reader(given, output)
    owned = split.kind is None
    if len(files) > 1:
        data = reader.sites(files, described)
    elif described is None:
        data = reader.rows(given["data"], "train", owned=owned)
    else:
        data = reader.described(given["data"], described, owned)
    federation = federate(data, split, given["workers"], described, "cpu" if on_ray else given["device"])
    spec = federation.describe()
    schema = _named(data.schema, spec)
    test = _test_rows(given, reader, spec, schema, own=len(files) == 1)
    own_files = personal_files(federation.clients, personal, given["out"])
    warn_of_few_rows(method, len(data))

    whole = weighed(method, described, given["class_weight"])
    if given["calibrate"] or (given["calibrate"] is None and not isinstance(method, GradientMethod)):
        whole = Calibrated(whole)
    title = f"{method.key} on {', '.join(files[:3])}"
    with watched_page(given["watch"], title, output) as page, _engine(federation, given) as engine:
        started = time.perf_counter()
        try:
            with _progress(output, method) as progress:
                model = whole.fit(
                    engine,
                    checkpoint,
                    resume=given["resume"],
                    progress=progress,
                    watch=_watch(ctx, given, test),
                    follow=[tracked] if page is None else [tracked, page],
                )
        except KeyboardInterrupt as stop:
            raise Interrupted(_stopped(checkpoint)) from stop
        seconds = time.perf_counter() - started
        model.schema = schema
        if isinstance(model, GradientModel) and given["backbone"] is not None:
            model.parameters[pixel_rows.NOTED] = given["backbone"]
        check_finite(model, "the model, which was not saved,")
        accuracy = _accuracy(model, engine, data, test)
        accuracy["held_out"] = held_out_accuracy(model, weighed=given["class_weight"] is not None)
        scores = {f"{part}_accuracy": share for part, share in accuracy.items() if share is not None}
        for follower in [tracked] if page is None else [tracked, page]:
            follower.scored(scores)
        model.card = training_card(model, whole, rows=len(data), accuracy=accuracy, secure=given["secure"])
        if given["out"] is not None:
            model.save(given["out"])
    # What was trained in the end: of candidates, the one that was chosen.
    trained = next((tried.method for tried in model.tried if tried.chosen), method.key)
    document = {
        "method": trained,
        "parameters": settings_of(method, model),
        **counts_of(data, federation, split, spec),
        **traffic_of(model),
        "engine": given["engine"],
        "secure": given["secure"],
        **(rounds_of(method, model) if isinstance(method, GradientMethod) else {}),
        "seconds": seconds,
        "accuracy": accuracy,
        "test_rows": None if test is None else len(test),
        "calibration": card(model)["calibration"],
        "predicts": model.predicts,
        "personal": personalise(model, federation, test, personal, own_files, output),
        "model": given["out"],
        "checkpoint": checkpoint,
    }
    document["tried"] = [tried.as_dict() for tried in model.tried]
    document["warnings"] = doubts_about(
        model, data, test, accuracy, plain=described is None, weighed=given["class_weight"] is not None
    )
    output.result(document, lambda page: show_training(page, document))
    for doubt in document["warnings"]:
        output.warn(doubt)


@contextmanager
def _progress(output: Output, method: Method[Any]) -> Iterator[Callable[[Record, int], None]]:
    """A bar over exchanges, or over the rounds of a gradient method with loss and watched accuracy."""
    if not isinstance(method, GradientMethod):
        with output.progress(method.key) as progress:
            yield progress
        return
    said: dict[str, str] = {}
    with output.bar(method.key, "round") as advance:

        def tell(record: Record, expected: int) -> None:
            if "loss" in record.metrics:
                said["loss"] = f"loss {record.metrics['loss']:.4f}"
            if "test_accuracy" in record.metrics:
                said["test"] = f"test {percent(record.metrics['test_accuracy'])}"
            advance(record.step + 1, method.rounds, ", ".join(said.values()))

        yield tell


@contextmanager
def _engine(federation: LocalFederation, given: dict[str, Any]) -> Iterator[Engine]:
    """What carries the requests: this process, secure sums within it, or workers in Ray."""
    if given["secure"]:
        from fedsolve.privacy.secure import SecureFederation

        yield SecureFederation(federation)
    elif given["engine"] == "ray":
        from fedsolve.cluster.ray_federation import RayFederation

        with RayFederation.of(federation, workers=given["workers"], device=given["device"]) as workers:
            yield workers
    else:
        yield federation


def _watch(ctx: click.Context, given: dict[str, Any], test: Table | None) -> Watch | None:
    if given["evaluate_every"] is None:
        return None
    if test is None or test.labels is None:
        raise click.UsageError("--evaluate-every needs test rows: data with a test part, or --test DATA", ctx)
    return Watch(test.features, test.labels, every=given["evaluate_every"])


def _accuracy(model: Model, federation: Engine, data: Table, test: Table | None) -> dict[str, Any]:
    if not isinstance(model, GradientModel):
        score = None if test is None else model.score(test.features, test.labels)
        return {"train": federation.evaluate(model), "test": score}
    # All rows lie in this process: in one pass on the model's device they take a fraction of the time
    # that every client by itself would, and the count is the same.
    rows = {"train": data, "test": test}
    return {part: None if held is None else pixel_rows.accuracy(model, held) for part, held in rows.items()}


def _checkpoint(ctx: click.Context, given: dict[str, Any], output: Output) -> str | None:
    path: str | None = given["checkpoint"]
    if path is None:
        if given["resume"]:
            raise click.UsageError("--resume needs --checkpoint FILE to resume from", ctx)
        return None
    if given["out"] is not None and os.path.abspath(path) == os.path.abspath(given["out"]):
        raise click.UsageError("--checkpoint and --out name the same file; choose two", ctx)
    if os.path.exists(path) and not given["resume"]:
        raise ModelFileError(f"checkpoint {path} exists. Pass --resume to continue from it, or remove it.")
    if given["resume"] and not os.path.exists(path):
        output.note(f"{path} does not exist yet: starting from the beginning.")
    return path


def _schema(ctx: click.Context, given: dict[str, Any]) -> Schema | None:
    """The schema of the rows; options that it makes needless are refused."""
    if given["schema"] is None:
        return None
    for name, flag in (("label", "--label"), ("client", "--client-column"), ("drop", "--drop")):
        if given[name]:
            raise click.UsageError(f"the schema says what every column is; leave out {flag}", ctx)
    if not given["header"]:
        raise click.UsageError("a schema knows columns by name; leave out --no-header", ctx)
    return read_schema(given["schema"])


def _one_each(ctx: click.Context, given: dict[str, Any]) -> Division:
    """The division of several files: each is a client."""
    if any(given[name] is not None for name in DIVIDING):
        raise click.UsageError(
            "of several files each is one client; leave out --client-column and the partition", ctx
        )
    return Division(None)


def _named(schema: Schema | None, spec: Spec) -> Schema | None:
    """What the columns are, with the classes of all clients."""
    if schema is None or spec.classes is None:
        return schema
    return dataclasses.replace(schema, classes=tuple(spec.classes.tolist()))


def _test_rows(
    given: dict[str, Any], reader: Reader, spec: Spec, schema: Schema | None, own: bool
) -> Table | None:
    """The rows to evaluate on, read and checked before any training is done; `own`: the data's test part."""
    known: dict[str, Any] = {"classes": spec.classes, "width": spec.features, "schema": schema}
    if given["test"] is not None:
        return reader.rows(given["test"], **known)
    if own and given["features_key"] is None and "test" in reader.parts(given["data"]):
        return reader.rows(given["data"], "test", **known)
    return None


def _stopped(checkpoint: str | None) -> str:
    if checkpoint is not None and os.path.exists(checkpoint):
        return (
            f"interrupted; {checkpoint} holds the last exchange. Run the same command with --resume to go on."
        )
    return "interrupted; nothing was saved. With --checkpoint FILE a run can be continued."
