"""`fedsolve features`: rows through a backbone into the feature store, and what the store holds."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve import container
from fedsolve.cli.options import ExamplesGroup, Options, command, option, rare, required
from fedsolve.cli.output import Interrupted, Output, check_target, fact_grid, table
from fedsolve.data.address import Address
from fedsolve.data.backbones import DEFAULT_BACKBONE, Backbone, load_backbone
from fedsolve.data.datasets import Dataset, load_dataset
from fedsolve.data.datasets import datasets as known_datasets
from fedsolve.data.feature_store import ExtractionProgress, Features, FeatureStore, StoredFeatures
from fedsolve.errors import DataError, FedsolveError, ModelFileError
from fedsolve.pages.words import counted, duration, known, megabytes

_WORK = "The work"


@click.group(cls=ExamplesGroup)
def features() -> None:
    """Turn images or texts into features once, and keep them.

    Features are stored under a key made of the rows, the labels, the backbone and its preprocessing:
    equal features are never computed twice, and none are out of date.
    """


class DatasetOptions(Options):
    title = "The data"
    root: str | None = rare(
        None, "Folder with the files of named datasets.", "DIR", flag="--data-root", none="FEDSOLVE_DATA"
    )


class StoreOptions(Options):
    title = "The store"
    store: str | None = rare(
        None, "Folder of features.", "DIR", none="FEDSOLVE_STORE, else ~/.cache/fedsolve/features"
    )


def built(
    output: Output,
    dataset: Dataset,
    backbone: str,
    store: str | None = None,
    batch: int = 64,
    loaded: Backbone | None = None,
) -> tuple[Features, ExtractionProgress | None]:
    """The features of a dataset by this backbone, with a bar while there is work, and how that went.

    loaded: the backbone of this address where it is loaded already. Ctrl-C ends it with a message that says
    how much is done and how to go on.
    """
    network = load_backbone(backbone) if loaded is None else loaded
    told: list[ExtractionProgress] = []
    try:
        with output.bar(backbone, "row") as bar:

            def advance(progress: ExtractionProgress) -> None:
                told[:] = [progress]
                bar(progress.done, progress.total, _pace(progress))

            found = FeatureStore(store).build(
                dataset, network, batch=batch, progress=advance, address=backbone
            )
    except KeyboardInterrupt as stop:
        said = "interrupted before the first row; run the same command to start again."
        if told:
            done = f"{told[-1].done:,} of {told[-1].total:,} rows are done"
            said = f"interrupted; {done}. Run the same command to go on."
        raise Interrupted(said) from stop
    return found, told[-1] if told else None


class BuildOptions(DatasetOptions):
    address: str = required(argument=True)
    limit_train: int | None = option(
        None, "Use at most so many training rows, every class in its proportion.", "N", least=1
    )
    limit_test: int | None = option(None, "The same of test rows.", "N", least=1)
    text_column: str | None = option(None, "csv, parquet: the column of texts.", "NAME")
    backbone: str = option(DEFAULT_BACKBONE, "Turns rows into features.", "B", group=_WORK)
    device: str | None = option(
        None, "Where a torch network runs, such as cuda.", "NAME", none="cpu", group=_WORK
    )
    batch: int = option(64, "Rows extracted together.", least=1, group=_WORK)
    out: str | None = option(None, "Also write an npz file with a byte for each number.", "FILE", group=_WORK)
    directions: int | None = option(
        None, "Of this many principal directions of the training rows.", "N", least=1, group=_WORK
    )


@command(group=features)
def build(wanted: BuildOptions, held: StoreOptions, output: Output) -> None:
    """Turn the images or texts of the dataset ADDRESS into features, or find these in the store.

    ADDRESS is a name such as digits or cifar10, folder:PATH for images of your own in class folders, or
    csv:PATH for a column of texts; 'fedsolve datasets' lists them all. Stop with Ctrl-C when you like: the
    same command goes on where it stopped, and the result is the same to the last bit.

    # your own images, a folder for each class, through EfficientNet-Lite0
    fedsolve features build folder:./images
    # Fashion-MNIST with files under ./data, a part of it only
    fedsolve features build fashion-mnist --data-root data --limit-train 6000 --limit-test 1000
    # another backbone: the pixels themselves, an ONNX file, a folder of transformers
    fedsolve features build cifar10 --backbone pixels
    fedsolve features build cifar10 --backbone onnx:resnet.onnx
    fedsolve features build cifar10 --backbone hf:./vit
    # the texts of a column, by a model of sentence-transformers
    fedsolve features build csv:notes.csv?label=ward --text-column note --backbone st:./minilm
    # the file of the experiments on CIFAR-10, from the official archive under ./data
    fedsolve features build cifar10 --data-root data --directions 512 --out data/cifar10_lite0.npz
    """
    if wanted.out is None and wanted.directions is not None:
        raise DataError("--directions is how the file of --out is made; name one: --out FILE.npz.")
    if wanted.out is not None:
        check_target(wanted.out)
        if not wanted.out.lower().endswith(".npz"):
            raise DataError(f"--out writes an npz file; name it so, not {wanted.out}.")
    address, backbone = wanted.address, wanted.backbone
    if wanted.text_column is not None:
        address = Address.parse(address).adding(text=wanted.text_column)
    if wanted.device is not None:
        backbone = Address.parse(backbone).adding(device=wanted.device)
    dataset = load_dataset(address, wanted.root)
    if not dataset.is_images:
        raise DataError(
            f"{address} holds features already, which need no backbone. Use it as it is: 'fedsolve train'. "
            "Texts are named by their column: --text-column NAME."
        )
    dataset = dataset.limited(wanted.limit_train, wanted.limit_test)
    found, work = built(output, dataset, backbone, held.store, wanted.batch)
    document = {
        "key": found.key,
        "dataset": address,
        "backbone": backbone,
        "rows": found.manifest["rows"],
        "width": found.manifest["width"],
        "classes": list(found.class_names),
        "licence": found.manifest.get("licence"),
        "cut": found.manifest.get("cut", 0),
        "extracted": 0 if work is None else work.fresh,
        "images_per_second": None if work is None else work.rate,
        "seconds": 0.0 if work is None else work.seconds,
        "folder": FeatureStore(held.store).folder / found.key,
        "out": wanted.out,
    }
    if wanted.out is not None:
        stream = io.BytesIO()
        np.savez_compressed(stream, **found.compact(wanted.directions))  # type: ignore[arg-type]
        container.write_atomically(wanted.out, stream.getvalue())
    output.result(document, _built_lines(found, document))


@command("list", group=features)
def list_features(options: StoreOptions, output: Output) -> None:
    """List the stored features.

    Partial ones were interrupted; the command that began them continues them.

    # everything in the store, with keys
    fedsolve features list
    """
    held = FeatureStore(options.store)
    entries = held.entries()

    def show(page: Console) -> None:
        if not entries:
            page.print(
                f"No features in {held.folder}. Make some: fedsolve features build digits --backbone pixels"
            )
            return
        names = ("key", "dataset", "backbone", "rows", "width", "MB", "state")
        page.print(table(names, [_line(entry) for entry in entries], left=(0, 1, 2, 6)))
        page.print(f"{megabytes(sum(entry.nbytes for entry in entries))} MB in {held.folder}")

    told = [dataclasses.asdict(entry) for entry in entries]
    output.result({"store": held.folder, "features": told}, show)


class KeyOptions(StoreOptions):
    keys: tuple[str, ...] = option((), argument=True, metavar="[KEY]...")


@command(group=features)
def verify(options: KeyOptions, output: Output) -> None:
    """Check stored features against what was written.

    Reads all sets, or those whose keys begin as given. A set that differs is named, and the exit code is 4.

    # everything in the store
    fedsolve features verify
    # one set, by the beginning of its key
    fedsolve features verify 3fa4c1
    """
    held = FeatureStore(options.store)
    chosen = [held.resolve(key) for key in options.keys] or [entry.key for entry in held.entries()]
    problems: dict[str, str] = {}
    with output.bar("verifying", "set") as bar:
        for number, key in enumerate(chosen):
            bar(number, len(chosen), key[:12])
            try:
                held.get(key)
            except FedsolveError as problem:
                problems[key] = str(problem)
    if problems:
        more = f" ({len(problems)} of {len(chosen)} sets are not sound)" if len(chosen) > 1 else ""
        raise ModelFileError(f"{next(iter(problems.values()))}{more}")
    output.result({"sound": chosen}, f"{counted(len(chosen), 'set')} of features sound.")


class RemoveOptions(KeyOptions):
    partial: bool = option(False, "All sets whose extraction did not finish.")
    everything: bool = option(False, "All sets.", flag="--all")


@command(group=features)
def remove(options: RemoveOptions, output: Output) -> None:
    """Delete stored features.

    KEY is the beginning of a key. What they came from is not touched.

    # one set, by the beginning of its key
    fedsolve features remove 3fa4c1
    # everything that was not finished
    fedsolve features remove --partial
    """
    if not (options.keys or options.partial or options.everything):
        raise click.UsageError("name the keys to remove, or --partial, or --all")
    held = FeatureStore(options.store)
    chosen = [held.resolve(key) for key in options.keys]
    for entry in held.entries():
        if options.everything or (options.partial and entry.state == "partial"):
            chosen.append(entry.key)
    removed = [held.remove(key) for key in dict.fromkeys(chosen)]
    size = sum(entry.nbytes for entry in removed)
    document = {"removed": [entry.key for entry in removed], "nbytes": size}
    output.result(document, f"{counted(len(removed), 'set')} of features removed, {megabytes(size)} MB.")


def _pace(progress: ExtractionProgress) -> str:
    left = known(progress.remaining, lambda seconds: f", {duration(seconds)} left")
    return f"{progress.rate:,.0f} rows/s{left}"


def _built_lines(found: Features, told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = told["rows"]
    if told["extracted"]:
        pace = f"{told['images_per_second']:,.0f} a second"
        work = f"{told['extracted']:,} rows in {told['seconds']:.1f} s, {pace}"
    else:
        work = "nothing to do: the features were in the store"
    parts = " + ".join(f"{rows[part]:,} {part}" for part in ("train", "test") if part in rows)
    return [
        ("dataset", f"{told['dataset']} ({parts} rows, {len(found.class_names)} classes)"),
        ("backbone", f"{told['backbone']} ({told['width']:,} features)"),
        ("licence", known(told["licence"])),
        ("cut short", f"{told['cut']:,} texts, longer than what is read" if told["cut"] else ""),
        ("extracted", work),
        ("key", f"{found.key[:12]} (train on them: fedsolve train features:{found.key[:12]})"),
        ("folder", str(told["folder"])),
        ("file", known(told["out"])),
    ]


def _short(text: str, width: int = 18) -> str:
    """A long address by its end, which tells more than its beginning."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _line(entry: StoredFeatures) -> tuple[str, ...]:
    return (
        entry.key[:8],
        _short(entry.dataset),
        _short(entry.backbone),
        f"{entry.total:,}",
        known(entry.width, "{:,}"),
        megabytes(entry.nbytes),
        f"{100 * entry.done // max(1, entry.total)} % done" if entry.state == "partial" else entry.state,
    )


@command()
def datasets(output: Output) -> None:
    """List the datasets: address, contents, expected files, where to get them.

    An address names a dataset wherever a command takes one: 'digits', 'cifar10', 'folder:./images'. Files
    are looked for in the folder of --data-root, or of the variable FEDSOLVE_DATA; only hf: downloads
    anything. Options follow a question mark: 'folder:./images?test=0.3&seed=1'.

    # what there is, and where to get the files
    fedsolve datasets
    # the same for a program
    fedsolve datasets --json
    """
    every = known_datasets()

    def show(page: Console) -> None:
        for dataset in every:
            page.print(f"[bold]{dataset.name}[/bold]")
            lines = (("  what", dataset.title), ("  files", dataset.files), ("  from", dataset.source))
            page.print(fact_grid(lines))
            page.print()

    told = [
        {name: getattr(dataset, name) for name in ("name", "title", "files", "source")} for dataset in every
    ]
    output.result({"datasets": told}, show)
