"""Each client's own model, for `fedsolve train`: made, measured and saved client by client."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from fedsolve import registry
from fedsolve.cli.output import Output, check_target, percent
from fedsolve.closedform.apfl import APFL
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.data import partitions
from fedsolve.data.tables import Table
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.local_scores import LocalScores, client_rows, local_scores
from fedsolve.federation.method import Method
from fedsolve.gradient.personalised import PersonalMethod
from fedsolve.model import Model


def personal_keys() -> list[str]:
    """Keys of the methods that give every client a model of its own."""
    kinds = {info.key: registry.method_class(info.key) for info in registry.methods()}
    return [key for key, kind in kinds.items() if issubclass(kind, (APFL, PersonalMethod))]


def personal_folder(ctx: click.Context, folder: str | None, method: Method[Any]) -> Path | None:
    """Where the clients' models go; refused, before any training, where there are none to write."""
    if folder is None:
        return None
    if method.key not in personal_keys():
        known = ", ".join(personal_keys())
        raise click.UsageError(
            f"--personal needs a method with personal models ({known}), not {method.key}", ctx
        )
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise click.UsageError(f"--personal {folder} is a file; name a folder", ctx)
    check_target(str(path / "client.safetensors"))
    return path


def warn_of_few_rows(method: Method[Any], rows: int) -> None:
    """Say it where the shared stream can fit all rows by itself, so that no errors are left to refine."""
    if isinstance(method, APFL) and rows < 2 * method.width:
        warnings.warn(
            f"{rows:,} rows are few for a shared stream of width {method.width:,}: it may fit them so "
            "closely that the clients' own streams have nothing left to learn from. Use a width below half "
            "of the rows, or a larger ridge.",
            stacklevel=2,
        )


def personal_files(clients: Sequence[str], folder: Path | None, out: str | None) -> dict[str, Path]:
    """A file for every client, none without a folder; refused, before any training, where others lie there.

    out: where the shared model goes, which may be the same folder.
    """
    if folder is None:
        return {}
    files = _files(clients, folder)
    shared = None if out is None else Path(out).absolute()
    if shared in {file.absolute() for file in files.values()}:
        raise DataError(f"--out {out} is also the file of a client in --personal {folder}; choose another.")
    known = {shared, *(file.absolute() for file in files.values())}
    others = sorted(file.name for file in folder.glob("*.safetensors") if file.absolute() not in known)
    if others:
        named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ModelFileError(
            f"--personal {folder} holds {len(others)} models that are not of this run's clients ({named}). "
            "Remove them, or name another folder."
        )
    return files


def personalise(
    model: Model,
    federation: LocalFederation,
    test: Table | None,
    folder: Path | None,
    files: Mapping[str, Path],
    output: Output,
) -> dict[str, Any] | None:
    """Make every client's model, save it in its file, and score it on test rows like the client's own.

    None for a model that is the same for everybody, and where there is nothing to save or to score.
    """
    if not model.personalises or (folder is None and test is None):
        return None
    tests = None if test is None else _tests(test, federation)
    balances: dict[str, float] = {}
    ridges: dict[str, float] = {}
    correct: list[int] = []
    with output.bar("personalising", "client") as bar:
        for number, participant in enumerate(federation.participants):
            own = participant.personalise(model)
            if isinstance(own, PersonalModel):
                balances[participant.name] = float(own.balance)
                ridges[participant.name] = float(own.refinement_ridge)
            if participant.name in files:
                own.save(files[participant.name])
            if tests is not None:
                correct += local_scores(own, tests[number : number + 1]).correct.tolist()
            bar(number + 1, len(federation.clients), participant.name)
    told: dict[str, Any] = {
        "folder": None if folder is None else str(folder),
        "balances": balances or None,
        "refinement_ridges": ridges or None,
        "local_accuracy": None,
    }
    if tests is not None:
        shared = local_scores(model, tests, federation.clients)
        own_scores = LocalScores(federation.clients, np.array(correct), shared.rows)
        told["local_accuracy"] = {
            "shared": shared.as_dict() if model.predicts else None,
            "personal": own_scores.as_dict(),
        }
    return told


def personal_lines(told: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What the page says of the clients' own models."""
    if told is None:
        return []
    lines = []
    if told["local_accuracy"] is not None:
        shared, own = (told["local_accuracy"][name] for name in ("shared", "personal"))
        shared_words = "" if shared is None else f", shared model {percent(shared['mean'])}"
        lines.append(
            (
                "personal",
                f"{percent(own['mean'])} mean local accuracy{shared_words} (test rows dealt like each "
                "client's own)",
            )
        )
    if told["balances"] is not None:
        low, middle, high = np.quantile(list(told["balances"].values()), (0.0, 0.5, 1.0))
        lines.append(("balance", f"{middle:.2f} ({low:.2f} to {high:.2f} over the clients)"))
        low, middle, high = np.quantile(list(told["refinement_ridges"].values()), (0.0, 0.5, 1.0))
        if low < high:
            lines.append(("ridge", f"{middle:.3g} ({low:.3g} to {high:.3g} over the clients)"))
    if told["folder"] is not None:
        lines.append(("their models", f"{told['folder']}/CLIENT.safetensors"))
    return lines


def _tests(test: Table, federation: LocalFederation) -> list[Any]:
    """Test rows for every client, in the class shares of its training rows."""
    assert test.labels is not None
    labels = [participant.data.own_labels() for participant in federation.participants]
    owners = np.repeat(np.arange(len(labels)), [len(own) for own in labels])
    tested = partitions.alike(test.labels, np.concatenate(labels), owners, len(labels))
    return client_rows(np.asarray(test.features), test.labels, tested, len(labels))


def _files(clients: Sequence[str], folder: Path) -> dict[str, Path]:
    """A file for every client; names that a file cannot have are spelt with underscores."""
    names = {client: re.sub(r"[^\w.-]+", "_", client) for client in clients}
    if len(set(names.values())) < len(names):
        raise DataError(
            "two clients' names are the same as file names; rename them in the column that names owners."
        )
    return {client: folder / f"{name}.safetensors" for client, name in names.items()}
