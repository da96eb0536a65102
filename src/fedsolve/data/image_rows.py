"""Features of new images, made by exactly the backbone that the model was trained with.

A model keeps how its backbone was named, its preprocessing and a digest of its weights (`Extractor`).
Features by anything else are refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedsolve.data.backbones import Backbone, load_backbone
from fedsolve.data.images import SUFFIXES
from fedsolve.errors import DataError, FedsolveError
from fedsolve.tables.schema import Extractor

DEFAULT_BACKBONE = "efficientnet-lite0"


def known_backbone(wanted: Extractor, named: str | None = None) -> tuple[str, Backbone]:
    """The backbone of a model and its address; `named` if its files have moved.

    Another backbone, another preprocessing or other weights are refused.
    """
    if not wanted.address and named is None:
        raise DataError(
            f"these features came with their dataset ({wanted.recipe.get('name')}), not from a backbone, so "
            "that they cannot be made of other images. Train with a backbone (--backbone)."
        )
    address = named or wanted.address
    try:
        backbone = load_backbone(address)
    except FedsolveError as problem:
        if named is not None:
            raise
        raise type(problem)(
            f"the model's backbone cannot be loaded: {problem} Where it lies elsewhere, name it with "
            "--backbone; its weights and preprocessing are compared."
        ) from problem
    own = Extractor.of(address, backbone.identity, backbone.width or wanted.width)
    check_same(own, wanted, address)
    return address, backbone


def check_same(own: Extractor, wanted: Extractor, what: str) -> None:
    """Refuse another backbone than the model's and say what differs."""
    differences = own.differences(wanted)
    if differences:
        raise DataError(
            f"{what} does not give the features that the model was trained on: {'; '.join(differences)} (the "
            f"model's). Leave out --backbone to use the model's own, or bring back its {wanted.name}."
        )


def portable(address: str) -> str:
    """The address without local folders, to be shown to others."""
    place, mark, query = address.partition("?")
    kind, colon, target = place.partition(":")
    if colon and os.path.exists(os.path.expanduser(target)):
        target = Path(target).name
    parts = []
    for part in query.split("&") if mark else []:
        name, sign, value = part.partition("=")
        parts.append(f"{name}{sign}{Path(value).name if name == 'weights' else value}")
    return f"{kind}{colon}{target}{mark}{'&'.join(parts)}"


def is_images(path: str) -> bool:
    """Whether a path names an image file, or a folder, in which images are looked for."""
    return path.lower().endswith(SUFFIXES) or os.path.isdir(path)
