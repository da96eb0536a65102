"""`folder:PATH`: image files in one folder per class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Split, named_classes
from fedsolve.data.datasets.dataset_files import Known
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


KNOWN = (
    Known(
        "folder:PATH",
        "your own images, a folder for each class",
        "PATH/CLASS/*.png (or jpg, bmp, webp, tif), or PATH/train/CLASS and PATH/test/CLASS; without a test "
        "folder a fifth of each class is held out: ?test=SHARE&seed=N to choose, ?test=0 for none",
        "your disk",
        load,
    ),
)
