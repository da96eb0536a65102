"""`folder:PATH`: image files in one folder per class; and `tiny-imagenet`, which comes as such folders."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Known, Published, Split, find, named_classes, read_file
from fedsolve.data.images import SUFFIXES, FileImages, list_images
from fedsolve.errors import DataError, explained

TESTS = ("test", "val", "valid", "validation")
"""Folders that may hold the test part beside `train`; the first that exists does."""


def load(address: Address, root: Path | None) -> Dataset:
    """The images under PATH/train and PATH/test, or under PATH with a share of each class held out."""
    address.allow("test", "seed")
    path = address.path(root)
    train = path / "train"
    if not (subfolders(train) if train.is_dir() else []):
        train = path
    classes = class_folders(train)
    whole = class_split(train, classes)
    test = next((path / name for name in TESTS if (path / name).is_dir()), None) if train != path else None
    if test is None:
        return Dataset.parted(address, whole, str(path), classes)
    if "test" in address.options:
        raise DataError(f"{address.text}: {test} is the test part already; leave out the option 'test'.")
    return Dataset(address.text, whole, evaluation_split(test, classes), tuple(classes))


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; numbers in the order of their values."""
    if not folder.exists():
        raise DataError(f"{folder}: there is no such folder. Check the path.")
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder. Name the folder that has one subfolder per class.")
    with explained(f"{folder}: cannot read the folder", kinds=OSError), os.scandir(folder) as listing:
        names = [entry.name for entry in listing if entry.is_dir() and not entry.name.startswith(".")]
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)


def class_folders(folder: Path) -> list[str]:
    """The classes: names of the subfolders; there must be at least one."""
    names = subfolders(folder)
    if not names:
        loose = len(list_images(folder))
        contents = f"its {loose:,} images lie in no class" if loose else "it is empty"
        raise DataError(
            f"{folder}: no class folders; {contents}. Put the images ({', '.join(SUFFIXES)}) of each class "
            "in a subfolder with the name of the class."
        )
    return names


def class_split(folder: Path, classes: Sequence[str]) -> Split:
    """The images of these class folders; none may be empty."""
    split, empty = _listed(folder, classes)
    if len(empty) == len(classes):
        raise DataError(f"{folder}: no images in any of its {len(classes)} folders ({', '.join(SUFFIXES)}).")
    if empty:
        others = f" (nor in {len(empty) - 1} others)" if len(empty) > 1 else ""
        raise DataError(
            f"{folder / empty[0]}: no images in this class folder{others}. Add images "
            f"({', '.join(SUFFIXES)}) or remove the folder."
        )
    return split


def evaluation_split(folder: Path, classes: Sequence[str]) -> Split:
    """The images of a test part; classes may be missing, but none may be unknown."""
    strange = [name for name in subfolders(folder) if name not in set(classes)]
    if strange:
        raise DataError(
            f"{folder / strange[0]}: a class of the test part that is not in the training part, which has "
            f"{named_classes(classes)}. Add training images of it, or remove the folder."
        )
    split, missing = _listed(folder, classes)
    if len(missing) == len(classes):
        raise DataError(f"{folder}: no images in the class folders of the test part.")
    if missing:
        warnings.warn(f"{folder}: no test image of {named_classes(missing)}.", stacklevel=2)
    return split


def _listed(folder: Path, classes: Sequence[str]) -> tuple[Split, list[str]]:
    """The images in the folders of these classes, and the classes that have none."""
    listed = [list_images(folder / name) if (folder / name).is_dir() else [] for name in classes]
    names = [f"{name}/{file}" for name, files in zip(classes, listed, strict=True) for file in files]
    labels: Array = np.repeat(np.arange(len(classes)), [len(files) for files in listed])
    missing = [name for name, files in zip(classes, listed, strict=True) if not files]
    return Split(FileImages(names, folder), labels), missing


# -- Tiny ImageNet: 200 classes of ImageNet at 64 x 64, in the folder its archive unpacks to ---------

_IDS, _WORDS, _ANNOTATIONS = "wnids.txt", "words.txt", "val_annotations.txt"


@dataclass(frozen=True)
class TinyImageNet(Published):
    """Classes, and training and test images of each."""

    classes: int = 200
    train: int = 500
    test: int = 50


def load_tiny_imagenet(known: TinyImageNet, root: Path | None) -> Dataset:
    """The dataset; every class and image is checked. Images stay on disk.

    The labels of its official test images were never published, so its validation part is the test part
    here, as in the papers.
    """
    home = find(known, root, ("tiny-imagenet-200", "tiny-imagenet", "."), [_IDS])[_IDS].parent
    ids = sorted(_lines(home / _IDS, known))
    if len(ids) != known.classes or len(set(ids)) != len(ids):
        raise DataError(f"{home / _IDS}: {len(set(ids))} classes, expected {known.classes}. {known.again}")
    train, _ = _listed(home / "train", ids)
    annotations = home / "val" / _ANNOTATIONS
    if annotations.exists():
        test = _annotated(annotations, ids, known)
    elif (home / "val").is_dir() and subfolders(home / "val") not in ([], ["images"]):
        test = evaluation_split(home / "val", ids)
    else:
        raise DataError(f"{annotations}: the file is missing, and with it the labels. {known.again}")
    for part, split, count in (("train", train, known.train), ("val", test, known.test)):
        counts = np.bincount(split.labels, minlength=len(ids))
        wrong = np.flatnonzero(counts != count)
        if len(wrong):
            raise DataError(
                f"{home / part}: class {ids[wrong[0]]} has {counts[wrong[0]]} images, expected {count}. "
                f"{known.again}"
            )
    return Dataset("tiny-imagenet", train, test, _class_names(home, ids, known))


def _annotated(path: Path, ids: list[str], known: Published) -> Split:
    """The validation images and the class each line of the annotations gives."""
    positions = {name: index for index, name in enumerate(ids)}
    names, labels = [], []
    for number, line in enumerate(_lines(path, known), start=1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in positions:
            raise DataError(f"{path}, line {number}: class {label!r} is not in {_IDS}. {known.again}")
        if not (path.parent / "images" / name).is_file():
            raise DataError(f"{path.parent / 'images' / name}: the image is missing. {known.again}")
        names.append(f"images/{name}")
        labels.append(positions[label])
    return Split(FileImages(names, path.parent), np.array(labels, dtype=np.int64))


def _class_names(home: Path, ids: list[str], known: Published) -> tuple[str, ...]:
    """The first word for each class; its id where that is missing or not unique."""
    words = {}
    if (home / _WORDS).exists():
        pairs = (line.partition("\t") for line in _lines(home / _WORDS, known))
        words = {name: text.partition(",")[0].strip() for name, _, text in pairs}
    counts = Counter(words.get(name) for name in ids)
    return tuple(words[name] if words.get(name) and counts[words[name]] == 1 else name for name in ids)


def _lines(path: Path, known: Published) -> list[str]:
    text = read_file(path, known).decode("utf-8", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


TINY_IMAGENET = TinyImageNet(
    "tiny-imagenet",
    "photographs, 64 x 64 colour, 200 classes, 100,000 + 10,000 images (validation part as test)",
    f"tiny-imagenet-200/ with {_IDS}, {_WORDS}, train/ and val/, as the archive unpacks it, in the data "
    "folder",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    load_tiny_imagenet,
)

KNOWN = (
    TINY_IMAGENET,
    Known(
        "folder:PATH",
        "your own images, a folder for each class",
        "PATH/CLASS/*.png (or jpg, bmp, webp, tif), or PATH/train/CLASS and PATH/test/CLASS; without a test "
        "folder a fifth of each class is held out: ?test=SHARE&seed=N to choose, ?test=0 for none",
        "your disk",
        load,
    ),
)
