"""`fedsolve train`: from a data file to a model file, over simulated clients."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from fedsolve import container, registry
from fedsolve.backends.devices import check_name, resolve
from fedsolve.cli.inputs import READING, ClientOptions, Division, RowOptions
from fedsolve.cli.method_options import MethodCommand, MethodOptions, is_gradient
from fedsolve.cli.model_options import DeviceOptions
from fedsolve.cli.options import command, option, rare, required
from fedsolve.cli.output import Interrupted, Output, check_target, fact_grid, table
from fedsolve.cli.watched import TrackerOptions, WatchOptions, watched_page
from fedsolve.closedform.apfl import APFL, warn_of_few_rows
from fedsolve.closedform.private import Private
from fedsolve.data.partitions import heterogeneity
from fedsolve.data.row_reader import is_address, spooled
from fedsolve.errors import ModelFileError
from fedsolve.federation.card import held_out_card, traffic, training_card
from fedsolve.federation.engine import Federation, Follow, Followers, Spec, hears
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method
from fedsolve.federation.recipe import Recipe
from fedsolve.gradient import pixel_form
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.personalised import PersonalMethod
from fedsolve.gradient.watch import Watch, rounds_of
from fedsolve.labels import Task
from fedsolve.pages.words import known, percent, traffic_words
from fedsolve.scoring.client_scores import own_models, personal_files
from fedsolve.scoring.evaluation import doubts_about, evaluate, held_out_accuracy
from fedsolve.tables.proposal import propose_for, summary
from fedsolve.tables.schema import Schema, read_schema, write_schema
from fedsolve.tables.table_file import Table

_TELLING = ("scale", "gain", "ridge", "residual_ridge", "width", "bandwidth", "landmarks")
"""The settings that tell candidates apart."""
_UNEVEN = "; heterogeneity {:.2f}, from 0: equal shares of classes, to 1: a class each"
_SHARED_PART = "of the shared part by itself, which is not meant to predict (see --personal)"


def is_personal(key: str) -> bool:
    return issubclass(registry.method_class(key), (APFL, PersonalMethod))


class TrainOptions(TrackerOptions, WatchOptions, DeviceOptions, MethodOptions):
    title = "Training"
    data: tuple[str, ...] = required(argument=True, metavar="DATA...")
    out: str | None = option(None, "Where to save the model (.safetensors).", "FILE")
    test: str | None = option(
        None, "Rows to evaluate on after training.", "DATA", none="the data's test part"
    )
    task: Task | None = rare(None, "What the labels are: classes, or numbers.", none="as they look")
    personal: str | None = option(
        None, "Folder for the clients' own models, CLIENT.safetensors.", "DIR", applies=is_personal
    )
    workers: int | None = rare(None, "Clients to compute at the same time.", none="all cores")
    engine: Literal["local", "ray"] = rare(
        "local", "local: threads here; ray: workers on the cluster of RAY_ADDRESS, or here."
    )
    secure: bool = option(False, "Secure sums: only totals are visible (needs fedsolve[privacy]).")
    calibrate: bool | None = rare(None, none="closed-form methods do")
    class_weight: Literal["balanced"] | None = option(None)
    checkpoint: str | None = option(None, "Save the state after every exchange.", "FILE")
    resume: bool = option(False, "Continue from --checkpoint if that file exists.")
    evaluate_every: int | None = option(
        None, "Evaluate on the test rows every N rounds too.", "N", least=1, applies=is_gradient
    )
    schema: str | None = option(
        None, "What the columns are.", "FILE", none="proposed if not all numbers", group=READING
    )
    schema_out: str | None = option(None, "Where to write the schema (.toml).", "FILE", group=READING)

    def check_checkpoint(self, output: Output) -> None:
        """Refuse options with which a checkpoint would be lost."""
        path = self.checkpoint
        if path is None:
            if self.resume:
                raise click.UsageError("--resume needs --checkpoint FILE to resume from")
            return
        if self.out is not None and os.path.abspath(path) == os.path.abspath(self.out):
            raise click.UsageError("--checkpoint and --out name the same file; choose two")
        if os.path.exists(path) and not self.resume:
            raise ModelFileError(
                f"checkpoint {path} exists. Pass --resume to continue from it, or remove it."
            )
        if self.resume and not os.path.exists(path):
            output.note(f"{path} does not exist yet: starting from the beginning.")

    def stopped(self) -> str:
        """What is left after Ctrl-C, and how to go on."""
        if self.checkpoint is None or not os.path.exists(self.checkpoint):
            return "interrupted; nothing was saved. With --checkpoint FILE a run can be continued."
        return f"interrupted; {self.checkpoint} holds the last exchange. Repeat the command with --resume."


@command(cls=MethodCommand)
def train(options: TrainOptions, clients: ClientOptions, reading: RowOptions, output: Output) -> None:
    """Train a classifier over simulated clients.

    DATA is a file (npz, csv, parquet), several files, one for each client, or the address of a dataset, such
    as digits or folder:./images ('fedsolve datasets'). Closed-form methods solve for the model exactly,
    whatever the partition; gradient methods need fedsolve[torch]. 'fedsolve train --method NAME --help' shows
    the parameters of NAME, --help-all everything.

    Details:
    An npz holds the arrays x and y, or x_train, y_train, x_test and y_test; features are decoded as
    offset + scale * x where it has these arrays. Images are turned into features
    by --backbone, once.

    Rows are dealt to clients by a partition, or by a column that names their owner. Of closed-form methods
    only sums leave a client, and the model that all of them get does not depend on the partition. Gradient
    methods train a head on the features or a whole network on the images, round by round.

    # DeepAFL over 20 clients with very uneven classes
    fedsolve train data.npz --method deepafl --layers 10 --partition dirichlet --out model
    # AFL, in one exchange, on a csv whose column 'hospital' says who owns each row
    fedsolve train patients.csv --method afl --label diagnosis --client-column hospital --out model
    # a raw table with categories, dates and missing values, by a schema that you reviewed
    fedsolve schema patients.csv --label diagnosis --client-column hospital --out schema.toml
    fedsolve train patients.csv --schema schema.toml --out model.safetensors
    # several findings a row, each a column of 0 and 1
    fedsolve train radiographs.csv --labels edema,effusion,fracture --out model.safetensors
    # one file from each hospital; their columns may be in any order
    fedsolve train north.csv south.csv --label diagnosis --out model.safetensors
    # a model of its own for every client, balanced by the client itself
    fedsolve train data.npz --method apfl --balance auto --partition dirichlet \\
        --out shared.safetensors --personal clients
    # your own images, in one folder per class, as features of a pre-trained backbone
    fedsolve train folder:./images --clients 5 --out model.safetensors
    # a long run that can be stopped and continued with the same line
    fedsolve train data.npz --method deepafl --layers 50 --checkpoint run.ckpt --resume --out model
    # a gradient method to compare with: FedProx on a shallow head, with feedback alignment
    fedsolve train data.npz --method fedprox --network mlp:64 --rounds 50 \\
        --feedback lowest --out model.safetensors
    # a whole network on images; what FedProx takes, and nothing else
    fedsolve train fashion-mnist --data-root DIR --method fedavg --network mobilenet_v2
    fedsolve train --method fedprox --help
    """
    with spooled(options.data) if "-" in options.data else nullcontext(options.data) as files:
        _train(files, options, clients, reading, output)


def _train(
    files: Sequence[str], options: TrainOptions, clients: ClientOptions, reading: RowOptions, output: Output
) -> None:
    named = ", ".join("standard input" if file == "-" else file for file in options.data[:3])
    for written in (options.out, options.checkpoint, options.schema_out):
        check_target(written, *files, options.test, options.schema, root=reading.root)
    described: Schema | None = None
    if options.schema is not None:
        for flag in (*reading.given("label", "labels", "drop"), *clients.given("client")):
            raise click.UsageError(f"the schema says what every column is; leave out {flag}")
        if not reading.header:
            raise click.UsageError("a schema knows columns by name; leave out --no-header")
        described = read_schema(options.schema)
    split = clients.division(files, described)
    method = options.chosen(output)
    options.check_checkpoint(output)
    if isinstance(method, GradientMethod):
        pixel_form.check_torch(method.network, f"method '{method.key}'")
        method, backbone = pixel_form.for_training(
            method, files[0], described, reading.backbone, reading.root
        )
        reading = dataclasses.replace(reading, backbone=backbone)
    elif options.evaluate_every is not None:
        raise click.UsageError(f"--evaluate-every counts rounds of gradient methods; {method.key} has none")
    on_ray = options.engine == "ray"
    # Workers in Ray check for themselves whether they have it: this machine needs no GPU for theirs.
    device = (check_name if on_ray else resolve)(options.device)
    if options.personal is not None:
        _check_personal(options.personal, method)
    if on_ray and (options.secure or is_personal(method.key)):
        what = "--secure" if options.secure else f"method '{method.key}', whose clients keep models,"
        raise click.UsageError(f"{what} needs --engine local")

    followers = options.followers() if options.tracker else []
    reader = reading.reader(output, clients.client)
    public = method.preparation == "public"
    tables = reading.header and not any(is_address(one) or one.lower().endswith(".npz") for one in files)
    if described is None and tables:  # a table of plain numbers needs no schema
        described = propose_for(files, reader.layout, options.task, glance=not public)
    if described is not None and options.schema is None:
        if public:
            raise click.UsageError(
                f"{named}: no plain table of numbers, and a schema read off the rows is not covered by "
                "--epsilon. Write one from what is known about the columns, or let 'fedsolve schema' propose "
                "one from rows that are no secret, and give it as --schema."
            )
        output.note(f"{named}: without --schema, the columns are")
        for line in summary(described):
            output.note(f"  {line}")
    if len(files) > 1:  # a client each
        data = reader.sites(files, described)
    elif described is None:
        data = reader.rows(files[0], "train", owned=split.kind is None)
    else:
        data = reader.described(files[0], described, owned=split.kind is None)
    names = data.schema.labels if data.schema is not None else reader.layout.label_names
    settings: dict[str, Any] = {"schema": described, "task": options.task, "label_names": names}
    settings |= {"workers": options.workers, "device": "cpu" if on_ray else device}
    federation = split.federate(data, **settings)
    spec = federation.describe()
    schema = data.schema
    if schema is not None and spec.classes is not None:
        schema = dataclasses.replace(schema, classes=tuple(spec.classes.tolist()))
    elif schema is not None:
        schema = dataclasses.replace(schema, task="regression")
    if spec.classes is None:
        if split.kind not in (None, "iid"):
            raise click.UsageError(f"--partition {split.kind} deals classes; a regression takes iid")
        if options.task is None and not names:
            output.note("the labels are numbers: a regression. With --task classification each is a class.")
    if options.schema_out is not None and schema is not None:
        write_schema(schema, options.schema_out)
    test: Table | None = None
    known: dict[str, Any] = {"classes": spec.classes, "width": spec.features, "schema": schema}
    if options.test is not None:
        test = reader.rows(options.test, **known)
    elif not (tables or reading.features_key or len(files) > 1) and "test" in reader.parts(files[0]):
        test = reader.rows(files[0], "test", **known)
    own_files = {}
    if options.personal is not None:
        own_files = personal_files(federation.clients, Path(options.personal), options.out)
    if isinstance(method, APFL):
        warn_of_few_rows(method, len(data))

    watching = []
    if options.evaluate_every is not None:
        if test is None or test.labels is None:
            raise click.UsageError("--evaluate-every needs test rows: data with a test part, or --test DATA")
        watching = [Watch(test.features, test.labels, every=options.evaluate_every)]
    if options.out is None:
        output.note("the model is not kept; name a file with --out to keep it.")
    calibrate = options.calibrate
    if calibrate is None:  # whatever has a closed form is: in one process it costs little
        calibrate = not isinstance(method, GradientMethod | Private)
    whole = Recipe(method, described, class_weight=options.class_weight, calibrate=calibrate)
    title = f"{method.key} on {named}"
    watching_page = watched_page(title, output) if options.watch else nullcontext()
    with watching_page as page, _engine(federation, options, device) as engine:
        started = time.perf_counter()
        followers += [] if page is None else [page]
        try:
            rounds = method.rounds if isinstance(method, GradientMethod) else None
            with output.progress(method.key, rounds) as progress:
                told = hears("planned", output.note)
                heard: Follow = [*watching, *progress, told, *followers]
                model = whole.fit(engine, options.checkpoint, options.resume, heard)
        except KeyboardInterrupt as stop:
            raise Interrupted(options.stopped()) from stop
        seconds = time.perf_counter() - started
        if schema is not None and model.features == schema.width:
            model.schema = schema
        if isinstance(model, GradientModel) and reading.backbone is not None:
            model.parameters[pixel_form.NOTED] = reading.backbone
        model.check_finite("the model, which was not saved,")
        # All rows lie in this process: a network scores them in one pass on its device in a fraction of the
        # time that every client by itself would take, and the count is the same.
        networks = isinstance(model, GradientModel)
        accuracy: dict[str, Any] = {
            "train": model.score(data.features, data.labels) if networks else evaluate(engine, model),
            "test": None if test is None else model.score(test.features, test.labels),
        }
        accuracy["held_out"] = held_out_accuracy(model, balanced=options.class_weight is not None)
        of_what = "r2" if model.regression else "accuracy"
        scores = {f"{part}_{of_what}": share for part, share in accuracy.items() if share is not None}
        Followers(followers).tell("scored", scores)
        model.card = training_card(model, whole, rows=len(data), secure=options.secure, **{of_what: accuracy})
        if options.out is not None:
            container.keep_previous(options.out)
            model.save(options.out)
    # What was trained in the end: of candidates, the one that was chosen.
    trained = next((tried.method for tried in model.tried if tried.chosen), method.key)
    document = {
        "method": trained,
        "parameters": (not networks and getattr(model, "parameters", None)) or method.parameters(),
        **counts_of(data, federation, split, spec),
        **traffic(model.history),
        "engine": options.engine,
        "secure": options.secure,
        **(rounds_of(method, model) if isinstance(method, GradientMethod) else {}),
        "seconds": seconds,
        of_what: accuracy,
        "test_rows": None if test is None else len(test),
        **held_out_card(model),
        "predicts": model.predicts,
        "personal": None,
        "model": options.out,
        "checkpoint": options.checkpoint,
    }
    if model.personalises and (own_files or test is not None):
        with output.bar("personalising", "client") as bar:
            document["personal"] = own_models(model, federation, test, own_files, bar)
        document["personal"]["folder"] = options.personal
    document["tried"] = [tried.as_dict() for tried in model.tried]
    document["warnings"] = doubts_about(
        model, data, test, accuracy, plain=described is None, balanced=options.class_weight is not None
    )
    output.result(document, lambda page: show_training(page, document))


def _check_personal(folder: str, method: Method[Any]) -> None:
    """Refuse, before any training, a folder for models that there will not be, or that cannot be written."""
    if not is_personal(method.key):
        known = ", ".join(info.key for info in registry.methods() if is_personal(info.key))
        raise click.UsageError(f"--personal needs a method with personal models ({known}), not {method.key}")
    check_target(f"{folder}/client.safetensors")


def _engine(
    federation: LocalFederation, options: TrainOptions, device: str
) -> AbstractContextManager[Federation]:
    """What carries the requests: threads or secure sums within this process, or workers in Ray."""
    if options.secure:
        from fedsolve.privacy.secure import SecureFederation

        return nullcontext(SecureFederation(federation))
    if options.engine == "local":
        return nullcontext(federation)
    from fedsolve.cluster.ray_federation import RayFederation

    return RayFederation.of(federation, workers=options.workers, device=device)


# -- the report: numbers for programs, and lines for people ------------------------------------------


def counts_of(data: Table, federation: LocalFederation, split: Division, spec: Spec) -> dict[str, Any]:
    assert data.labels is not None
    dealt: dict[str, Any] = {"kind": "named"}
    if split.kind is not None:
        dealt = {"kind": split.kind, **split.options, "seed": split.seed}
    owners = np.empty(len(data), dtype=np.int64)
    for index, name in enumerate(federation.clients):
        owners[federation[name].data.rows] = index
    classes = None if spec.classes is None else spec.classes.tolist()
    rows = {} if classes is None else {one: float(np.mean(data.labels == one)) for one in classes}
    return {
        "data": data.source,
        "rows": len(data),
        "features": spec.features,
        "task": federation.task,
        "classes": classes,
        "largest_class": max(rows.items(), key=lambda one: one[1], default=None),
        "labels": list(spec.labels) or None,
        "clients": len(federation.clients),
        "empty_clients": len(federation.clients) - len(np.unique(owners)),
        "partition": {
            **dealt,
            "heterogeneity": None if spec.classes is None else heterogeneity(data.labels, owners),
        },
    }


def show_training(page: Console, told: dict[str, Any]) -> None:
    split, numbers = told["partition"], told["classes"] is None and not told["labels"]
    accuracy, of_what = (told["r2"], "R²") if numbers else (told["accuracy"], "accuracy")
    empty = f", {told['empty_clients']} of them empty" if told["empty_clients"] else ""
    dealt = "named by the data" if split["kind"] == "named" else split["kind"]
    compared = any(one["loss"] is not None for one in told["tried"])
    held_out = told["calibration"] is not None or told["intervals"] is not None
    parts = ["choice"] * compared + ["calibration"] * held_out
    if parts == ["calibration"]:
        parts.insert(0, "a training without the rows held out")
    twice = f" ({', '.join(parts)} and training)" if parts else ""
    settings = ("layers", "width", "ridge", "epochs", "batch", "rate")
    shown_settings = ", ".join(f"{n} {v}" for n, v in told["parameters"].items() if n in settings)
    several = f"{len(told['labels'] or ())} labels each"
    predicts = (
        "a number each" if numbers else several if told["labels"] else f"{len(told['classes'])} classes"
    )
    if (largest := told["largest_class"]) is not None:
        predicts += f", most often {largest[0]!r} ({percent(largest[1])})"

    form, final = "{:.4f}".format if numbers else percent, told.get("final_accuracy")
    scored = {
        "train": "on the clients' training rows",
        "held_out": "on rows held out, before all were trained on",
        "test": f"on {told['test_rows'] or 0:,} test rows",
    }
    for part, where in scored.items():
        scored[part] = "" if accuracy[part] is None else f"{form(accuracy[part])} {where}"

    calibrated = ""
    if (fit := told["calibration"]) is not None:
        reached = f"(error {percent(fit['metrics']['ece'])}, log loss {fit['metrics']['log_loss']:.4f})"
        calibrated = f"calibrated on {fit['held_out_rows']:,} rows held out {reached}"
    if compared:
        _show_tried(page, told["tried"])
    lines = [
        ("method", f"{told['method']} ({shown_settings})"),
        ("clients", f"{told['clients']}{empty} ({dealt}{known(split['heterogeneity'], _UNEVEN)})"),
        ("rows", f"{told['rows']:,} of {told['features']:,} features, {predicts}"),
        *(_network_lines(told) if "weights" in told else ()),
        ("exchanges", f"{told['exchanges']}{twice}"),
        ("traffic", traffic_words(told)),
        ("sums", "secret: clients' answers were masked, only totals were opened" * told["secure"]),
        ("seconds", f"{told['seconds']:.2f}"),
        (of_what, scored["train"]),
        ("", scored["held_out"]),
        ("", scored["test"]),
        ("probabilities", calibrated),
        ("predictions", known(told["intervals"], _within)),
        ("", "" if told["predicts"] else _SHARED_PART),
        ("", "" if final is None else f"{percent(final)} on them over the last tenth of the rounds"),
        *([] if told["personal"] is None else _personal_lines(told["personal"])),
        ("model", told["model"]),
    ]
    page.print(fact_grid(lines))


def _within(told: dict[str, Any]) -> str:
    reach, errors = ", ".join(f"{far:.4g}" for far in told["reach"]), told["metrics"]
    reached = f"(mean absolute error {errors['mae']:.4g}, root mean squared {errors['rmse']:.4g})"
    return f"± {reach} hold 95 % of {told['held_out_rows']:,} rows held out {reached}"


def _show_tried(page: Console, tried: Sequence[Mapping[str, Any]]) -> None:
    page.print(tried_table(tried))
    if tried[0]["errors"] is not None:
        page.print(
            "Held out: right answers on rows held out. Squared error: of the scores there, summed over the "
            "classes; with two classes, half of it is the Brier score of scores that are probabilities. "
            "Numbers: what a client tells in a training."
        )
        page.print(
            "Of candidates within half a standard error of the fewest mistakes, the kind with the fewest "
            "exchanges is taken, then with the fewest numbers told.\n"
        )
    marks = [(one["method"], one["errors"], one["loss"]) for one in tried if one["loss"]]
    if len(set(marks)) < len(marks):
        page.print(
            "Rows with the same numbers differ in a setting without effect here, such as the scale of "
            "columns that have unit variance already.\n"
        )


def _personal_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if told["local_accuracy"] is not None:
        shared, own = (told["local_accuracy"][name] for name in ("shared", "personal"))
        shared_words = "" if shared is None else f", shared model {percent(shared['mean'])}"
        reached = f"{percent(own['mean'])} mean local accuracy{shared_words}"
        lines.append(("personal", f"{reached} (test rows dealt like each client's own)"))
    if told["balances"] is not None:
        low, middle, high = np.quantile(list(told["balances"].values()), (0.0, 0.5, 1.0))
        lines.append(("balance", f"{middle:.2f} ({low:.2f} to {high:.2f} over the clients)"))
        low, middle, high = np.quantile(list(told["refinement_ridges"].values()), (0.0, 0.5, 1.0))
        if low < high:
            lines.append(("ridge", f"{middle:.3g} ({low:.3g} to {high:.3g} over the clients)"))
    return [*lines, ("their models", known(told["folder"], "{}/CLIENT.safetensors"))]


def _network_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    parameters = told["parameters"]
    loss = known(told["loss"], ", local loss {:.4f} in the last") + known(told["drift"], ", drift {:.4g}")
    last = f", last in {', '.join(told['feedback_layers'])}" if told["feedback_layers"] else ""
    return [
        ("network", f"{parameters['network']} ({told['weights']:,} weights)"),
        ("rounds", f"{told['rounds']}{loss}"),
        ("feedback", known(parameters["feedback"], "{}" + last)),
    ]


def tried_table(tried: Sequence[Mapping[str, Any]]) -> RichTable:
    """Candidates with their marks on the rows held out; an arrow at the one that was taken."""
    settings = [
        ", ".join(f"{n.replace('_', ' ')} {one['settings'][n]}" for n in _TELLING if n in one["settings"])
        for one in tried
    ]
    columns = {
        "": ["->" if one["chosen"] else "" for one in tried],
        "tried": [one["method"] for one in tried],
        "settings": settings,
        "layers": [known(one["layers"]) for one in tried],
        "held out": [known(one["errors"], lambda share: percent(1.0 - share)) for one in tried],
        "squared error": [known(one["loss"], "{:.4f}") for one in tried],
        "exchanges": [known(one["exchanges"]) for one in tried],
        "numbers": [known(one["numbers"], "{:,}") for one in tried],
        "left out": [one["left_out"] for one in tried],
    }
    used = {head: cells for head, cells in columns.items() if any(cells)}
    left = [place for place, head in enumerate(used) if head in ("", "tried", "settings", "left out")]
    return table([*used], [*zip(*used.values(), strict=True)], left=left)
