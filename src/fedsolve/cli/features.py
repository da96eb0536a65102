"""`fedsolve features`: images through a backbone into the feature store, and what the store holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fedsolve.cli.command import Command, ExamplesGroup, F, option, options
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Interrupted, Output, facts, megabytes, table
from fedsolve.data.datasets import Dataset, load_dataset
from fedsolve.data.feature_store import ExtractionProgress, Features, FeatureStore, StoredFeatures
from fedsolve.errors import DataError, FedsolveError, ModelFileError

if TYPE_CHECKING:
    from fedsolve.data.backbones import Backbone

BACKBONE = "efficientnet-lite0"

_DATA = "The data"
_WORK = "The work"
_STORE = "The store"

EXAMPLES = (
    (
        "your own images, a folder for each class, through EfficientNet-Lite0",
        "fedsolve features build folder:./images",
    ),
    (
        "what is stored, whether it is sound, and away with what is not needed",
        "fedsolve features list\nfedsolve features verify\nfedsolve features remove 3fa4c1",
    ),
)


@click.group(cls=ExamplesGroup, examples=EXAMPLES)
def features() -> None:
    """Turn images into features once, and keep them.

    Features are stored under a key made of the images, the labels, the backbone and its preprocessing:
    the same question is never computed twice, and nothing stale is ever found.
    """


def data_root_option(command: F) -> F:
    """Decorator: --data-root, the folder of datasets."""
    return option(
        "--data-root",
        "root",
        metavar="DIR",
        more=True,
        group=_DATA,
        help="Folder with the files of named datasets.  [default: FEDSOLVE_DATA]",
    )(command)


def store_option(command: F) -> F:
    """Decorator: --store, the folder of features."""
    return option(
        "--store",
        metavar="DIR",
        more=True,
        group=_STORE,
        help="Folder of features.  [default: FEDSOLVE_STORE, else ~/.cache/fedsolve/features]",
    )(command)


@dataclass(frozen=True)
class Built:
    """Features, and what they took in this run: images extracted, seconds, images per second."""

    features: Features
    images: int = 0
    seconds: float = 0.0
    rate: float | None = None


def built(
    output: Output,
    dataset: Dataset,
    backbone: str,
    store: str | None = None,
    batch: int = 64,
    loaded: Backbone | None = None,
) -> Built:
    """The features of a dataset by this backbone, with a bar while there is work to do.

    loaded: the backbone of this address where it is loaded already. Ctrl-C ends it with a message that says
    how much is done and how to go on.
    """
    from fedsolve.data.backbones import load_backbone

    network = load_backbone(backbone) if loaded is None else loaded
    told: list[ExtractionProgress] = []
    try:
        with output.bar(backbone, "image") as bar:

            def advance(progress: ExtractionProgress) -> None:
                told[:] = [progress]
                bar(progress.done, progress.total, _pace(progress))

            found = FeatureStore(store).build(
                dataset, network, batch=batch, progress=advance, address=backbone
            )
    except KeyboardInterrupt as stop:
        raise Interrupted(_stopped(told)) from stop
    if not told:
        return Built(found)
    return Built(found, told[-1].fresh, told[-1].seconds, told[-1].rate)


def _limit(part: str) -> Callable[[F], F]:
    text = f"Use at most so many {part} images, every class in its proportion."
    return option(f"--limit-{part}", type=click.IntRange(1), metavar="N", group=_DATA, help=text)


@features.command(
    cls=Command,
    examples=(
        EXAMPLES[0],
        (
            "Fashion-MNIST with files under ./data, a part of it only",
            "fedsolve features build fashion-mnist --data-root data --limit-train 6000 --limit-test 1000",
        ),
        (
            "another backbone: the pixels themselves, an ONNX file, a folder of transformers",
            "fedsolve features build cifar10 --backbone pixels\n"
            "fedsolve features build cifar10 --backbone onnx:resnet.onnx\n"
            "fedsolve features build cifar10 --backbone hf:./vit",
        ),
    ),
)
@click.argument("address")
@data_root_option
@_limit("train")
@_limit("test")
@option("--backbone", metavar="B", default=BACKBONE, group=_WORK, help="What turns images into features.")
@option("--batch", type=click.IntRange(1), default=64, group=_WORK, help="Images extracted together.")
@store_option
@output_options
def build(
    address: str,
    root: str | None,
    limit_train: int | None,
    limit_test: int | None,
    backbone: str,
    batch: int,
    store: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn the images of the dataset ADDRESS into features, or find these in the store.

    ADDRESS is a name such as digits or cifar10, or folder:PATH for images of your own in class folders;
    'fedsolve datasets' lists them all. Stop with Ctrl-C when you like: the same command goes on where it
    stopped, and the result is the same to the last bit.
    """
    output = Output(as_json, quiet)
    dataset = load_dataset(address, root)
    if not dataset.is_images:
        raise DataError(
            f"{address} holds features already, which need no backbone. Use it as it is: 'fedsolve train'."
        )
    if limit_train is not None or limit_test is not None:
        dataset = dataset.limited(limit_train, limit_test)
    work = built(output, dataset, backbone, store, batch)
    found = work.features
    document = {
        "key": found.key,
        "dataset": address,
        "backbone": backbone,
        "rows": found.manifest["rows"],
        "width": found.manifest["width"],
        "classes": list(found.class_names),
        "extracted": work.images,
        "images_per_second": work.rate,
        "seconds": work.seconds,
        "folder": FeatureStore(store).folder / found.key,
    }
    output.result(document, lambda page: _show_built(page, found, document))


@features.command(
    "list",
    cls=Command,
    examples=(("everything in the store, with keys", "fedsolve features list"),),
)
@store_option
@output_options
def list_features(store: str | None, as_json: bool, quiet: bool) -> None:
    """List the stored features.

    Partial ones were interrupted; the command that began them goes on with them.
    """
    held = FeatureStore(store)
    entries = held.entries()

    def show(page: Console) -> None:
        if not entries:
            page.print(
                f"No features in {held.folder}. Make some: fedsolve features build digits --backbone pixels"
            )
            return
        names = ("key", "dataset", "backbone", "images", "width", "MB", "state")
        page.print(table(names, [_line(entry) for entry in entries], left=(0, 1, 2, 6)))
        page.print(f"{megabytes(sum(entry.nbytes for entry in entries))} MB in {held.folder}")

    told = [dataclasses.asdict(entry) for entry in entries]
    Output(as_json, quiet).result({"store": held.folder, "features": told}, show)


@features.command(
    cls=Command,
    examples=(
        ("everything in the store", "fedsolve features verify"),
        ("one set, by the beginning of its key", "fedsolve features verify 3fa4c1"),
    ),
)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@store_option
@output_options
def verify(keys: tuple[str, ...], store: str | None, as_json: bool, quiet: bool) -> None:
    """Check stored features against what was written.

    Reads all sets, or those whose keys begin as given. A set that differs is named, and the exit code is 4.
    """
    held = FeatureStore(store)
    output = Output(as_json, quiet)
    chosen = [held.resolve(key) for key in keys] or [entry.key for entry in held.entries()]
    problems: dict[str, str] = {}
    with output.bar("verifying", "set") as bar:
        for number, key in enumerate(chosen):
            bar(number, len(chosen), key[:12])
            try:
                held.verify(key)
            except FedsolveError as problem:
                problems[key] = str(problem)
    if problems:
        more = f" ({len(problems)} of {len(chosen)} sets are not sound)" if len(chosen) > 1 else ""
        raise ModelFileError(f"{next(iter(problems.values()))}{more}")
    output.result({"sound": chosen}, lambda page: page.print(f"{_sets(chosen)} sound."))


@features.command(
    cls=Command,
    examples=(
        ("one set, by the beginning of its key", "fedsolve features remove 3fa4c1"),
        ("everything that was not finished", "fedsolve features remove --partial"),
    ),
)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@options(
    option("--partial", is_flag=True, group=_STORE, help="All sets whose extraction did not finish."),
    option("--all", "everything", is_flag=True, group=_STORE, help="All sets."),
)
@store_option
@output_options
@click.pass_context
def remove(
    ctx: click.Context,
    keys: tuple[str, ...],
    partial: bool,
    everything: bool,
    store: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Delete stored features.

    KEY is the beginning of a key. The images they came from are not touched.
    """
    if not (keys or partial or everything):
        raise click.UsageError("name the keys to remove, or --partial, or --all", ctx)
    held = FeatureStore(store)
    chosen = [held.resolve(key) for key in keys]
    chosen += [entry.key for entry in held.entries() if everything or (partial and entry.state == "partial")]
    removed = [held.remove(key) for key in dict.fromkeys(chosen)]
    size = sum(entry.nbytes for entry in removed)
    document = {"removed": [entry.key for entry in removed], "nbytes": size}
    Output(as_json, quiet).result(
        document, lambda page: page.print(f"{_sets(removed)} removed, {megabytes(size)} MB.")
    )


def _sets(found: Sequence[object]) -> str:
    return f"{len(found)} set{'' if len(found) == 1 else 's'} of features"


def _pace(progress: ExtractionProgress) -> str:
    left = "" if progress.remaining is None else f", {_clock(progress.remaining)} left"
    return f"{progress.rate:,.0f} images/s{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _stopped(told: Sequence[ExtractionProgress]) -> str:
    if not told:
        return "interrupted before the first image; run the same command to start again."
    done = f"{told[-1].done:,} of {told[-1].total:,} images are done"
    return f"interrupted; {done}. Run the same command to go on."


def _show_built(page: Console, found: Features, told: dict[str, Any]) -> None:
    rows = told["rows"]
    if told["extracted"]:
        pace = f"{told['images_per_second']:,.0f} a second"
        work = f"{told['extracted']:,} images in {told['seconds']:.1f} s, {pace}"
    else:
        work = "nothing to do: the features were in the store"
    parts = " + ".join(f"{rows[part]:,} {part}" for part in ("train", "test") if part in rows)
    lines = [
        ("dataset", f"{told['dataset']} ({parts} images, {len(found.class_names)} classes)"),
        ("backbone", f"{told['backbone']} ({told['width']:,} features)"),
        ("extracted", work),
        ("key", f"{found.key[:12]} (train on them: fedsolve train features:{found.key[:12]})"),
        ("folder", str(told["folder"])),
    ]
    facts(page, lines)


def _short(text: str, width: int = 18) -> str:
    """A long address by its end, which tells more than its beginning."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _share(entry: StoredFeatures) -> str:
    return f"{100 * entry.done // entry.total if entry.total else 0} %"


def _line(entry: StoredFeatures) -> tuple[str, ...]:
    return (
        entry.key[:8],
        _short(entry.dataset),
        _short(entry.backbone),
        f"{entry.total:,}",
        "" if entry.width is None else f"{entry.width:,}",
        megabytes(entry.nbytes),
        f"{_share(entry)} done" if entry.state == "partial" else entry.state,
    )
