"""`fedsolve describe`, `glm`, `cox`, `survival` and `mixed`: results over files that several sites own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from fedsolve import registry
from fedsolve.cli.inputs import READING, DialectOptions
from fedsolve.cli.method_options import PREFIX, ParameterCommand, given_parameters
from fedsolve.cli.options import METHOD, Options, command, option, required
from fedsolve.cli.output import Output, check_target, write_text
from fedsolve.closedform.private import Private
from fedsolve.data.row_reader import site_names
from fedsolve.errors import DataError, naming
from fedsolve.federation.local import LocalFederation
from fedsolve.model import load_model
from fedsolve.parameters import described
from fedsolve.statistics.describe import ColumnSummary
from fedsolve.statistics.release import Release
from fedsolve.statistics.results import StatisticModel
from fedsolve.tables.formula import unknown, variables, words_of
from fedsolve.tables.proposal import propose_columns
from fedsolve.tables.schema import Column, Schema, read_schema
from fedsolve.tables.table_file import read_table

_RESULT = "Result"


class SiteRows(DialectOptions):
    title = READING
    data: tuple[str, ...] = required(argument=True, metavar="DATA...")
    client: str | None = option(
        None, "Column that names each row's site.", "NAME", flag="--client-column", none="by files"
    )
    schema: str | None = option(
        None, "What the columns are ('fedsolve schema').", "FILE", none="as the files show"
    )
    secure: bool = option(False, "Secure sums: only totals are visible.", group=_RESULT)
    epsilon: float | None = option(
        None, "Noise that hides a row: of glm, describe and release.", group=_RESULT, none="no noise"
    )
    out: str | None = option(None, "Save the result (.safetensors).", "FILE", group=_RESULT)
    table: str | None = option(
        None, "Write the table: .md, .tex, .csv, .json or, of describe, .html.", "FILE", group=_RESULT
    )
    plot: str | None = option(
        None, "Draw the forest plot or the curves: .svg or .png.", "FILE", group=_RESULT
    )


class StatisticCommand(ParameterCommand):
    """A command that asks one method; the method's parameters are its options, a formula is an argument."""

    besides = frozenset(("--formula", "--epsilon"))

    def __init__(self, *args: Any, key: str, formula: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.key = key
        if formula:
            self.params.insert(0, click.Argument([f"{PREFIX}formula"], metavar="FORMULA"))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        ctx.meta[METHOD] = self.key
        return super().get_params(ctx)


def _question(name: str, page: str, key: str = "") -> click.Command:
    """The command that asks the method of this name, or of another key."""
    key = key or name
    formula = "formula" in described(registry.method_class(key))
    title, example = page.split("\n", 1)
    asked = f"{key} --formula ..." if formula else key
    told = f"{title}\n\n{_DATA.format(asked)}\n\n{example}"

    @command(name, cls=StatisticCommand, key=key, formula=formula, help=told)
    def question(rows: SiteRows, output: Output) -> None:
        _ask(key, rows, output)

    return question


_DATA = """DATA is csv or parquet: a file for each site, or one file with --client-column. Only sums leave a
site. Over a network the same question is 'fedsolve server --method {}'."""

describe = _question(
    "describe",
    """Describe the columns over all sites: counts, means, quantiles, categories, gaps.
# a page with a picture of every column
fedsolve describe north.csv south.csv --table page.html""",
)
release = _question(
    "release",
    """Make one noisy Gram matrix of the columns, which answers linear questions ever after.
# columns are bounded by the reference and scale that the schema states for them
fedsolve release north.csv south.csv --schema schema.toml --epsilon 2 --out release.safetensors
# without asking a site again, and without more budget
fedsolve fit release.safetensors "outcome ~ age + sex\"""",
)
glm = _question(
    "glm",
    """Fit a generalised linear model to the rows of all sites.
# a logistic regression over two hospitals
fedsolve glm 'died ~ age + C(sex)' north.csv south.csv --family binomial --plot forest.svg""",
)
cox = _question(
    "cox",
    """Fit a Cox regression to the rows of all sites.
# a baseline hazard for each hospital
fedsolve cox 'Surv(days, died) ~ age + C(arm)' trial.csv --client-column hospital""",
)
survival = _question(
    "survival",
    """Kaplan-Meier curves and the log-rank test over all sites.
# a curve for each arm
fedsolve survival trial.csv --client-column site --time days --event died --by arm --plot km.svg""",
    "kaplan-meier",
)
mixed = _question(
    "mixed",
    """Fit a linear model with a random intercept for each site.
# by firm
fedsolve mixed 'invest ~ value + capital' grunfeld.csv --client-column firm""",
)


def _ask(key: str, rows: SiteRows, output: Output) -> None:
    for target in (rows.out, rows.table, rows.plot):
        check_target(target, *rows.data, rows.schema)
    noise: dict[str, Any] = {} if rows.epsilon is None else {"epsilon": rows.epsilon}
    own = given_parameters() | (noise if key == "release" else {})
    method: Any = registry.method_class(key)(**own)
    # A description asks nothing of its own, so it is of all columns.
    asked = [method.parameters().get(name) for name in ("offset", "weights")]
    if (key == "release" or noise) and rows.schema is None:
        raise DataError(
            "noise needs --schema FILE: its bounds, or references and scales, bound the columns, and taken "
            "from the rows they would tell about them. 'fedsolve schema' makes a draft; write the bounds."
        )
    whole = key in ("describe", "release")
    words = None if whole else " ".join([method.asked, *filter(None, asked)])
    if noise and key != "release":
        method = Private(method, **noise)
    federation: Any = _federation(rows, output, words)
    named = {"schema": federation.schema} if key == "release" else {}
    if rows.secure:
        from fedsolve.privacy.secure import SecureFederation

        federation = SecureFederation(federation)
    with output.progress(key) as progress:
        model: StatisticModel = method.fit(federation, follow=progress, **named)
    if rows.out is not None:
        model.save(rows.out)
    if rows.table is not None:
        write_text(rows.table, _written(model, rows.table))
    if rows.plot is not None:
        model.plot(rows.plot)
    output.result(model.document(), lambda page: click.echo(str(model)))


def _written(model: StatisticModel, path: str) -> str:
    """The table as the name of its file wants it."""
    if path.endswith(".html") and isinstance(model, ColumnSummary):
        return model.page()
    forms = {".md": model.to_markdown, ".tex": model.to_latex, ".json": model.to_json}
    forms[".csv"] = lambda: str(model.to_frame().to_csv(index=False))
    if Path(path).suffix not in forms:
        raise DataError(f"{path}: a table is written as {', '.join(forms)}; a description also as .html.")
    return forms[Path(path).suffix]() + "\n"


def _federation(rows: SiteRows, output: Output, words: str | None) -> LocalFederation:
    """The sites of these files; words: what the question says, of whose columns a schema is made."""
    schema = _shown(rows, output, words) if rows.schema is None else read_schema(rows.schema)
    if rows.client is not None:
        schema = replace(schema, client=rows.client)
    owned = schema.client is not None and len(rows.data) == 1
    settings: dict[str, Any] = {"labelled": schema.label is not None, "owned": owned, "weighted": True}
    tables = [read_table(file, schema, rows.dialect(), extra="ignore", **settings) for file in rows.data]
    owners = [
        np.full(len(each), name) if each.owners is None else each.owners.astype(str)
        for name, each in zip(site_names(rows.data), tables, strict=True)
    ]
    owner, site = np.concatenate(owners), schema.client or "site"
    features = np.concatenate([each.features for each in tables])
    if re.search(rf"(?<![\w.]){re.escape(site)}(?![\w.])", words or "") and site not in variables(schema):
        if rows.secure:
            raise DataError(
                f"'{site}' in a formula asks for each site's own sums, which secure sums hide. Use --robust "
                "cluster, 'fedsolve mixed', or 'fedsolve cox', which has a baseline for each site."
            )
        levels = sorted(set(owner))
        factor = Column(site, "category", categories=tuple(levels))
        features = np.hstack([features, owner[:, None] == np.array([*levels, ""])])
        schema = replace(schema, columns=(*schema.columns, factor), client=None)
    weights = [each.weights for each in tables if each.weights is not None]
    labels = np.concatenate([np.zeros(len(each)) if each.labels is None else each.labels for each in tables])
    return LocalFederation.from_arrays(
        features,
        labels,
        owner,
        task="classification" if labels.dtype.kind in "US" else "regression",
        schema=schema,
        sample_weight=np.concatenate(weights) if weights else None,
    )


def _shown(rows: SiteRows, output: Output, words: str | None) -> Schema:
    """A schema of the columns that the question names, as all files show them."""
    coded, by = set(re.findall(r"C\(\s*`?([^`,()]+)`?\s*[,)]", words or "")), given_parameters().get("by")
    known: list[str] = []

    def asked(name: str) -> bool:
        known.append(name)
        found = words is None or re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", words)
        return bool(found) and name != rows.client

    columns = propose_columns(rows.data, rows.dialect(), coded | {str(by)}, asked)
    bare = re.sub(r"`[^`]*`", "", words or "")
    for name in (name for name in known if re.search(r"\w\W+\w", name) and name in bare):
        raise DataError(
            f"the name of column '{name}' is more than letters and digits: write `{name}` where it stands by "
            "itself, or rename it."
        )
    for name in words_of(words or ""):
        if name not in (*known, "site"):
            with naming(rows.data[0]):
                raise unknown(name, known)
    if not columns:
        raise DataError(f"{rows.data[0]} has none of the columns that are asked about.")
    for column in columns:
        if column.kind == "unused" and words is not None:
            raise DataError(f"column '{column.name}' is no number: {column.remark.removeprefix('unused: ')}")
        if column.kind == "unused" or column.absent or column.signs:
            output.note(f"column '{column.name}': {column.remark}")
    return Schema(columns, client=rows.client)


class FitOptions(Options):
    release: str = required(argument=True, metavar="RELEASE")
    formula: str = required(argument=True, metavar="FORMULA")
    ridge: float = option(0.0, "Penalty on the coefficients.")


@command()
def fit(options: FitOptions, output: Output) -> None:
    """Fit the linear model FORMULA to the file RELEASE, with intervals that include its noise.

    No site is asked, and no budget is spent: the noise is in the file.

    # coefficients with two intervals: of the population, and of what the pooled rows would give
    fedsolve fit release.safetensors "outcome ~ age + sex"
    """
    made = load_model(options.release)
    if not isinstance(made, Release):
        raise DataError(f"{options.release} is a model of family '{made.family}', not a release.")
    found = made.fit(options.formula, options.ridge)
    output.result(found.document(), lambda page: click.echo(str(found)))
