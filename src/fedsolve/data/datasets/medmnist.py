"""`medmnist:NAME`: medical images of the MedMNIST collection, one npz file each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_files import Known, find, unknown
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError, explained
from fedsolve.tables.npz import open_npz

_ORGANS = (
    "bladder, left femur, right femur, heart, left kidney, right kidney, liver, left lung, right lung, "
    "pancreas, spleen"
)
_SIZES = ("28", "64", "128", "224")

CLASSES: dict[str, tuple[str, ...]] = {
    name: tuple(names.split(", "))
    for name, names in {
        "path": "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon mucosa, "
        "cancer-associated stroma, adenocarcinoma epithelium",
        "derma": "actinic keratoses, basal cell carcinoma, benign keratosis, dermatofibroma, melanoma, "
        "melanocytic nevi, vascular lesions",
        "oct": "choroidal neovascularization, diabetic macular edema, drusen, normal",
        "pneumonia": "normal, pneumonia",
        "retina": "grade 0, grade 1, grade 2, grade 3, grade 4",
        "breast": "malignant, normal or benign",
        "blood": "basophil, eosinophil, erythroblast, immature granulocyte, lymphocyte, monocyte, "
        "neutrophil, platelet",
        "tissue": "collecting duct, distal convoluted tubule, glomerular endothelial, interstitial "
        "endothelial, leukocyte, podocyte, proximal tubule, thick ascending limb",
        "organa": _ORGANS,
        "organc": _ORGANS,
        "organs": _ORGANS,
    }.items()
}
"""For each dataset with one label per image, its classes in order."""


def load(address: Address, root: Path | None) -> Dataset:
    """The official training and test parts; ?val=train adds the validation part to the former.

    ?size=64 (128, 224) takes the larger images of MedMNIST+.
    """
    address.allow("size", "val")
    name = address.rest.lower().removesuffix("mnist")
    if name == "chest":
        raise DataError("medmnist:chest has several labels per image; fedsolve takes one label per image.")
    if name not in CLASSES:
        raise unknown("MedMNIST dataset", address.rest, CLASSES)
    size = address.word("size", _SIZES) or _SIZES[0]
    validation = address.word("val", ("out", "train"))
    file = f"{name}mnist.npz" if size == _SIZES[0] else f"{name}mnist_{size}.npz"
    path = find(KNOWN[0], root, ("medmnist", "."), [file])[file]
    splits = []
    with open_npz(path) as arrays:
        for sources in (("train", "val") if validation == "train" else ("train",), ("test",)):
            read = [_part(path, arrays, source, int(size), len(CLASSES[name])) for source in sources]
            pixels, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
            splits.append(Split(ArrayImages(pixels, str(path)), labels))
    train, test = splits
    return Dataset(f"medmnist:{name}", train, test, CLASSES[name])


def _part(path: Path, arrays: dict[str, Array], part: str, size: int, classes: int) -> tuple[Array, Array]:
    images = _array(path, arrays, f"{part}_images")
    labels = _array(path, arrays, f"{part}_labels")
    if images.ndim not in (3, 4) or images.shape[1:3] != (size, size):
        raise DataError(
            f"{path}: '{part}_images' must be images of {size} x {size} pixels; got shape {images.shape}. "
            f"{KNOWN[0].again}"
        )
    if labels.shape not in ((len(images),), (len(images), 1)) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: '{part}_labels' must hold one number for each of {len(images)} images; got shape "
            f"{labels.shape}, dtype {labels.dtype}."
        )
    labels = labels.reshape(-1).astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"{path}: '{part}_labels' has classes {labels.min()} to {labels.max()}, expected 0 to "
            f"{classes - 1}."
        )
    return images, labels


def _array(path: Path, arrays: dict[str, Array], key: str) -> Array:
    if key not in arrays:
        raise DataError(f"{path}: no array '{key}'. {KNOWN[0].again}")
    with explained(f"{path}: truncated or damaged ('{key}')", KNOWN[0].again):
        return np.asarray(arrays[key])


KNOWN = (
    Known(
        "medmnist:NAME",
        f"medical images, 28 x 28 (?size=64, 128, 224); NAME is one of {', '.join(CLASSES)}",
        "medmnist/NAMEmnist.npz (NAMEmnist_64.npz and so on for larger images) in the data folder",
        "https://medmnist.com",
        load,
    ),
)
