"""`tiny-imagenet`: 200 classes of ImageNet at 64 x 64, in the folder its archive unpacks to.

The labels of its official test images were never published, so its validation part is the test part
here, as in the papers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsolve.data.datasets import folder
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_files import Known, Published, find, read_file
from fedsolve.data.images import FileImages
from fedsolve.errors import DataError

_IDS, _WORDS, _ANNOTATIONS = "wnids.txt", "words.txt", "val_annotations.txt"


@dataclass(frozen=True)
class TinyImageNet(Published):
    """Classes, and training and test images of each."""

    classes: int = 200
    train: int = 500
    test: int = 50


def load(known: TinyImageNet, root: Path | None) -> Dataset:
    """The dataset; every class and image is checked. Images stay on disk."""
    home = find(known, root, ("tiny-imagenet-200", "tiny-imagenet", "."), [_IDS])[_IDS].parent
    ids = sorted(_lines(home / _IDS))
    if len(ids) != known.classes or len(set(ids)) != len(ids):
        raise DataError(f"{home / _IDS}: {len(set(ids))} classes, expected {known.classes}. {known.again}")
    absent = [name for name in ids if not (home / "train" / name).is_dir()]
    if absent:
        raise DataError(
            f"{home / 'train' / absent[0]}: the folder of this class is missing"
            + (f", and {len(absent) - 1} others" if len(absent) > 1 else "")
            + f". {known.again}"
        )
    train = folder.class_split(home / "train", ids)
    annotations = home / "val" / _ANNOTATIONS
    if annotations.exists():
        test = _annotated(annotations, ids, known)
    elif (home / "val").is_dir() and folder.subfolders(home / "val") not in ([], ["images"]):
        test = folder.evaluation_split(home / "val", ids)
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
    return Dataset("tiny-imagenet", train, test, _class_names(home, ids))


def _annotated(path: Path, ids: list[str], known: Known) -> Split:
    """The validation images and the class each line of the annotations gives."""
    positions = {name: index for index, name in enumerate(ids)}
    names, labels = [], []
    for number, line in enumerate(_lines(path), start=1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in positions:
            raise DataError(f"{path}, line {number}: class {label!r} is not in {_IDS}. {known.again}")
        if not (path.parent / "images" / name).is_file():
            raise DataError(f"{path.parent / 'images' / name}: the image is missing. {known.again}")
        names.append(f"images/{name}")
        labels.append(positions[label])
    return Split(FileImages(names, path.parent), np.array(labels, dtype=np.int64))


def _class_names(home: Path, ids: list[str]) -> tuple[str, ...]:
    """The first word for each class; its id where that is missing or not unique."""
    words = {}
    if (home / _WORDS).exists():
        pairs = (line.partition("\t") for line in _lines(home / _WORDS))
        words = {name: text.partition(",")[0].strip() for name, _, text in pairs}
    counts = Counter(words.get(name) for name in ids)
    return tuple(words[name] if words.get(name) and counts[words[name]] == 1 else name for name in ids)


def _lines(path: Path) -> list[str]:
    text = read_file(path).decode("utf-8", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


TINY_IMAGENET = TinyImageNet(
    "tiny-imagenet",
    "photographs, 64 x 64 colour, 200 classes, 100,000 + 10,000 images (validation part as test)",
    f"tiny-imagenet-200/ with {_IDS}, {_WORDS}, train/ and val/, as the archive unpacks it, in the data "
    "folder",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    load,
)

KNOWN = (TINY_IMAGENET,)
