"""The model file that a command reads, and the code from outside that it may run."""

from __future__ import annotations

import click

from fedsolve.cli.options import Options, option, rare, required
from fedsolve.errors import DataError
from fedsolve.model import Model, load_model
from fedsolve.registry import allowing


class AllowOptions(Options):
    networks: tuple[str, ...] = option(
        (), "Function that may make a network.", "P.M:F", flag="--allow-network"
    )
    methods: tuple[str, ...] = option((), "Method from outside that may run.", "P.M:C", flag="--allow-method")


class DeviceOptions(Options):
    device: str = rare("cpu", "Where to compute: cpu, torch:cpu, cuda, cuda:1, or auto.", "NAME")


class ModelOptions(AllowOptions):
    title = "Model"
    model: str = required(argument=True)

    def load(self) -> Model:
        """The model of the file; what is allowed stays so until the command ends."""
        click.get_current_context().with_resource(allowing(networks=self.networks, methods=self.methods))
        return load_model(self.model)

    def predictor(self) -> Model:
        """The model of the file, which is sound."""
        model = self.load()
        if model.classes is None and not model.predicts:
            raise DataError(f"{self.model} holds a result and predicts nothing; read it: fedsolve info.")
        model.check_finite(self.model)
        return model
