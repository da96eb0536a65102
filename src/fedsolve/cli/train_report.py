"""What `fedsolve train` tells of a training: numbers for programs, lines for people, and doubts."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console

from fedsolve.cli.clients import Division
from fedsolve.cli.doubts import (
    caveats,
    chance_doubt,
    gap_doubt,
    identifier_doubt,
    majority_doubt,
    quantity_doubt,
)
from fedsolve.cli.output import facts, megabytes, percent
from fedsolve.cli.own_models import personal_lines
from fedsolve.cli.tried import tried_table
from fedsolve.data.partitions import heterogeneity
from fedsolve.data.tables import Table
from fedsolve.federation.engine import Spec
from fedsolve.federation.history import totals
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method
from fedsolve.gradient.alignment import CHOICES
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.watch import final_accuracy
from fedsolve.model import Model


def settings_of(method: Method[Any], model: Model) -> dict[str, Any]:
    """The parameters that were trained with: of what was chosen, the choice."""
    chosen = None if isinstance(method, GradientMethod) else getattr(model, "parameters", None)
    return chosen or method.parameters()


def held_out_accuracy(model: Model, weighed: bool) -> float | None:
    """Accuracy on rows held out of what was chosen: of the model that was calibrated, else of its trial.

    The trial may have been a smaller one. Where classes are weighed, its mistakes are, and the other's not.
    """
    if model.tried and model.calibration is not None and not weighed:
        known = model.calibration.metrics.get("accuracy")
        if known is not None:
            return float(known)
    chosen = (tried.errors for tried in model.tried if tried.chosen and tried.errors is not None)
    return next((1.0 - errors for errors in chosen), None)


def doubts_about(
    model: Model, data: Table, test: Table | None, accuracy: dict[str, Any], plain: bool, weighed: bool
) -> list[str]:
    """What nobody should miss about this model; where classes are weighed, their shares are no measure."""
    doubts = identifier_doubt(data) if plain else []
    if not model.predicts:  # which the page says beside the accuracy
        return doubts
    assert data.labels is not None
    doubts += quantity_doubt(data.labels, "the label")
    if known := caveats(model):  # why accuracies are low, if they are
        return doubts + known
    if test is not None and test.labels is not None:
        doubts += [] if weighed else majority_doubt(accuracy["test"], test.labels, "test rows")
        doubts += gap_doubt(accuracy["train"], accuracy["test"])
    if accuracy["held_out"] is not None:
        told = chance_doubt if weighed else majority_doubt
        doubts += told(accuracy["held_out"], data.labels, "rows held out")
        doubts += (
            [] if test is not None else gap_doubt(accuracy["train"], accuracy["held_out"], "rows held out")
        )
    elif not weighed:
        doubts += majority_doubt(accuracy["train"], data.labels, "training rows")
    return doubts


def counts_of(data: Table, federation: LocalFederation, split: Division, spec: Spec) -> dict[str, Any]:
    assert spec.classes is not None
    assert data.labels is not None
    owners = np.empty(len(data), dtype=np.int64)
    for index, participant in enumerate(federation.participants):
        owners[participant.data.rows] = index
    return {
        "data": data.source,
        "rows": len(data),
        "features": spec.features,
        "classes": spec.classes.tolist(),
        "clients": len(federation.clients),
        "empty_clients": sum(len(participant) == 0 for participant in federation.participants),
        "partition": split.as_dict() | {"heterogeneity": heterogeneity(data.labels, owners)},
    }


def traffic_of(model: Model) -> dict[str, Any]:
    told = (
        "exchange",
        "kind",
        "step",
        "bytes_up",
        "bytes_down",
        "seconds",
        "risk",
        "accuracy",
        "solved",
        "metrics",
        "error_bounds",
    )
    risks = [record.risk for record in model.history if record.risk is not None]
    return {
        **totals(model.history),
        "risk": risks[-1] if risks else None,
        "history": [
            {name: getattr(record, name) for name in told} | {"clients": len(record.cohort)}
            for record in model.history
        ],
    }


def rounds_of(method: GradientMethod, model: GradientModel) -> dict[str, Any]:
    """What a gradient method reports of its rounds: the newest loss and, where they were measured, more."""
    losses = [record.metrics["loss"] for record in model.history if "loss" in record.metrics]
    drifts = [record.metrics["drift"] for record in model.history if "drift" in record.metrics]
    chosen = [record.metrics["feedback"] for record in model.history if "feedback" in record.metrics]
    watched = any("test_accuracy" in record.metrics for record in model.history)
    fixed = None if method.feedback in (None, *CHOICES) else method.feedback.split(",")
    return {
        "rounds": method.rounds,
        "weights": sum(array.size for array in model.weights.values()),
        "loss": losses[-1] if losses else None,
        "drift": drifts[-1] if drifts else None,
        "feedback_layers": fixed or (chosen[-1] if chosen else None),
        "final_accuracy": final_accuracy(model.history) if watched else None,
    }


def show_training(page: Console, told: dict[str, Any]) -> None:
    accuracy, split = told["accuracy"], told["partition"]
    empty = f", {told['empty_clients']} of them empty" if told["empty_clients"] else ""
    dealt = "named by the data" if split["kind"] == "named" else split["kind"]
    lines = [
        ("method", f"{told['method']} ({_changed(told)})"),
        ("clients", f"{told['clients']}{empty} ({dealt}; heterogeneity {split['heterogeneity']:.2f} of 1)"),
        ("rows", f"{told['rows']:,} of {told['features']:,} features, {len(told['classes'])} classes"),
        *_network_lines(told),
        ("exchanges", f"{told['exchanges']}{_calibrating(told)}"),
        ("traffic", f"{megabytes(told['bytes_up'])} MB up, {megabytes(told['bytes_down'])} MB down"),
        *(
            [("sums", "secret: clients' answers were masked, only totals were opened")]
            if told["secure"]
            else []
        ),
        ("seconds", f"{told['seconds']:.2f}"),
        ("accuracy", f"{percent(accuracy['train'])} on the clients' training rows"),
    ]
    if accuracy["held_out"] is not None:
        lines.append(("", f"{percent(accuracy['held_out'])} on rows held out, before all were trained on"))
    if accuracy["test"] is not None:
        lines.append(("", f"{percent(accuracy['test'])} on {told['test_rows']:,} test rows"))
    if told["calibration"] is not None:
        seen = told["calibration"]["metrics"]
        lines.append(
            (
                "probabilities",
                f"calibrated on {told['calibration']['held_out_rows']:,} rows held out "
                f"(error {percent(seen['ece'])}, log loss {seen['log_loss']:.4f})",
            )
        )
    if not told["predicts"]:
        lines.append(("", "of the shared part by itself, which is not meant to predict (see --personal)"))
    if told.get("final_accuracy") is not None:
        lines.append(("", f"{percent(told['final_accuracy'])} on them over the last tenth of the rounds"))
    lines += personal_lines(told["personal"])
    if told["model"] is not None:
        lines.append(("model", told["model"]))
    if told["tried"]:
        page.print(tried_table(told["tried"]))
    facts(page, lines)


def _network_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    """What was trained by gradient, and how it ended; nothing for closed forms."""
    if "weights" not in told:
        return []
    parameters = told["parameters"]
    drift = "" if told["drift"] is None else f", drift {told['drift']:.4g}"
    loss = "" if told["loss"] is None else f", local loss {told['loss']:.4f} in the last"
    lines = [
        ("network", f"{parameters['network']} ({told['weights']:,} weights)"),
        ("rounds", f"{told['rounds']}{loss}{drift}"),
    ]
    if parameters["feedback"] is not None:
        last = f", last in {', '.join(told['feedback_layers'])}" if told["feedback_layers"] else ""
        lines.append(("feedback", f"{parameters['feedback']}{last}"))
    return lines


def _calibrating(told: dict[str, Any]) -> str:
    """Why there are more exchanges than the method takes."""
    if told["calibration"] is None:
        return ""
    return " (training twice, once without the rows held out, and the calibration between them)"


def _changed(told: dict[str, Any]) -> str:
    shown = ("layers", "width", "ridge", "epochs", "batch", "rate")
    return ", ".join(f"{n} {v}" for n, v in told["parameters"].items() if n in shown)
