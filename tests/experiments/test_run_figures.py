"""Figures of runs: the right ones for the cells, with the right numbers, the same bytes each time."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex, to_rgb, to_rgba_array

from fedsolve.cli.experiment import figures, run_folders
from fedsolve.errors import ModelFileError
from fedsolve.experiments.observations import by_dataset, mean_error, names_of, scored
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.run_figures import (
    MOST_DOTS,
    owners_panel,
    plots,
    sensitivity_plots,
    slug,
    write_figures,
)
from fedsolve.experiments.run_folder import load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import digits
from fedsolve.pages.plots import FORMATS, SERIES, Axis, Panel, Series, draw, render, series_style
from tests import sample_runs

LINE = Series("one", 1, (1.0, 2.0, 3.0), (80.0, 81.5, 82.0), (0.1, math.nan, 0.3))
OTHER = Series("other", 0, (1.0, 3.0), (70.0, 71.0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {path.name: path for path in sample_runs.write_all(tmp_path_factory.mktemp("runs"))}


def lines(series, x=None, y=None):
    return draw([Panel(series, x or Axis("x"), y or Axis("y"))])


def heat_map(values, rows, columns):
    return draw([Panel((), Axis.of("across", columns), Axis.of("down", rows), kind="map", table=values)])


def _drawn(figure, panel=0):
    """The points of every line of a panel, by its name in the legend."""
    axes = figure.axes[panel]
    handles, names = axes.get_legend_handles_labels()
    found = {}
    for handle, name in zip(handles, names, strict=True):
        line = handle.lines[0] if hasattr(handle, "lines") else handle
        found[name] = (list(line.get_xdata()), list(line.get_ydata()))
    return found


# -- which figures a run can have ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("partitions", ["partition", "alpha", "shards", "cost", "depth", "risk"]),
        ("clients", ["partition", "clients", "cost", "depth", "risk"]),
        ("ridge", ["partition", "parameter-ridge", "cost", "depth", "risk"]),
        ("widths", ["partition", "map-width-hidden_width"]),
        ("activation", ["partition", "parameter-activation", "depth", "risk"]),
        ("ablations", ["partition", "methods", "cost", "depth", "separability", "risk"]),
        ("noise", ["partition", "noise", "risk"]),
    ],
)
def test_each_kind_of_experiment_has_its_figures(runs, name, expected):
    for found in plots(load_run(runs[name])).values():
        assert [plot.name for plot in found] == expected


@pytest.mark.slow
def test_every_figure_is_labelled_and_told_in_words(runs):
    for path in runs.values():
        for found in plots(load_run(path)).values():
            for plot in found:
                assert plot.title.endswith(".")
                assert plot.caption.endswith(".")
                assert len(plot.description) > 40
                assert any(axes.get_xlabel() for axes in plot.figure.axes)
                assert any(axes.get_ylabel() or axes.get_yticklabels() for axes in plot.figure.axes)


def test_figures_are_those_of_the_cells_that_are_there(runs, tmp_path):
    run = load_run(runs["clients"])
    assert run.missing == 2
    [found] = plots(run).values()
    assert "clients" in [plot.name for plot in found]
    bare = sample_runs.write_run(tmp_path / "bare", sample_runs.NOISE, leave_out=16)
    assert plots(load_run(bare)) == {}


def test_datasets_have_figures_of_their_own(runs):
    assert list(plots(load_run(runs["partitions"]))) == ["CIFAR-10", "digits <8 x 8> & more"]


def test_one_dataset_through_two_backbones_is_two(tmp_path):
    text = sample_runs.NOISE.replace('backbone = "pixels"', 'backbone = "pixels:4"')
    text += '\n[[dataset]]\nname = "digits"\naddress = "digits"\nbackbone = "pixels:8"\n'
    run = load_run(sample_runs.write_run(tmp_path / "two", text))
    assert list(by_dataset(run)) == ["digits (pixels:4)", "digits (pixels:8)"]
    assert [plot.name for plot in plots(run)["digits (pixels:8)"]] == ["partition", "noise", "risk"]


# -- the numbers in them ---------------------------------------------------------------------------


def test_lines_over_alpha_are_means_over_seeds(runs):
    run = load_run(runs["partitions"])
    alpha = next(plot for plot in plots(run)["CIFAR-10"] if plot.name == "alpha")
    drawn = _drawn(alpha.figure)
    assert list(drawn) == ["FedAvg", "AFL", "DeepAFL (T = 5)", "DeepAFL (T = 10)", "DeepAFL (T = 20)"]
    for name, depth in (("DeepAFL (T = 5)", 5), ("DeepAFL (T = 20)", 20)):
        x, y = drawn[name]
        assert x == [0.01, 0.1, 1.0]
        expected = [
            100
            * np.mean(
                [
                    cell["accuracy_per_layer"][depth]
                    for cell in run.cells
                    if cell["method"] == "DeepAFL"
                    and cell["dataset"]["name"] == "CIFAR-10"
                    and cell["partition"]["name"] == partition
                ]
            )
            for partition in ("α = 0.01", "α = 0.1", "IID")
        ]
        assert y == pytest.approx(expected, abs=1e-12)
    axes = alpha.figure.axes[0]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.01", "0.1", "IID"]


def test_depth_has_every_layer_and_level_lines_for_the_rest(runs):
    run = load_run(runs["partitions"])
    depth = next(plot for plot in plots(run)["CIFAR-10"] if plot.name == "depth")
    drawn = _drawn(depth.figure)
    assert drawn["DeepAFL"][0] == list(range(21))
    x, y = drawn["AFL"]
    assert x == [0, 20]
    assert y[0] == y[1] == pytest.approx(89.1)
    assert [axes.get_title(loc="left") for axes in depth.figure.axes] == ["test rows", "training rows"]


def test_rows_without_a_layered_score_have_no_panel(runs):
    run = load_run(runs["partitions"])
    for cell in run.cells:
        cell["train_accuracy_per_layer"] = None
    depth = next(plot for plot in plots(run)["CIFAR-10"] if plot.name == "depth")
    assert [sorted(line.name for line in panel.series) for panel in depth.panels] == [
        ["AFL", "DeepAFL", "FedAvg"]
    ]


def test_costs_are_those_up_to_each_depth(runs):
    run = load_run(runs["partitions"])
    plot = next(plot for plot in plots(run)["CIFAR-10"] if plot.name == "cost")
    megabytes, seconds = (_drawn(plot.figure, panel)["DeepAFL"][0] for panel in (0, 1))
    assert megabytes == pytest.approx([10 + 5 * 5, 10 + 5 * 10, 10 + 5 * 20])
    assert seconds == pytest.approx([0.4 + 0.3 * depth for depth in (5, 10, 20)])


def test_mean_and_standard_error():
    assert mean_error([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3 / 3)))
    mean, error = mean_error([5.0])
    assert mean == 5.0
    assert math.isnan(error)
    assert mean_error([math.nan, 3.0])[0] == 3.0


def test_names_tell_only_what_varies(runs):
    items = scored(load_run(runs["ridge"]).cells)
    name = names_of(items)
    assert {name(item) for item in items} == {"AFL"} | {
        f"DeepAFL (T = {depth}), λ = {ridge}"
        for depth in (5, 10)
        for ridge in ("0.001", "0.01", "0.1", "1", "10")
    }
    name = names_of(items, without=("ridge", "depth"))
    assert {name(item) for item in items} == {"AFL", "DeepAFL"}


def test_a_parameter_over_magnitudes_with_zero_stands_in_even_steps(tmp_path):
    text = sample_runs.RIDGE.replace("[0.001, 0.01,", "[0.0, 0.01,")
    # The made-up outcome takes the logarithm of the ridge; any accuracy will do here.
    path = sample_runs.write_run(tmp_path / "zero", text.replace("ridge =", "residual_ridge ="))
    [plot] = sensitivity_plots(scored(load_run(path).cells))
    axes = plot.figure.axes[0]
    assert axes.get_xscale() == "linear"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.01", "0.1", "1", "10"]
    assert axes.get_xlabel() == "residual ridge γ"


def test_methods_without_the_parameter_are_level_lines(runs):
    [plot] = sensitivity_plots(scored(load_run(runs["ridge"]).cells))
    drawn = _drawn(plot.figure)
    assert list(drawn) == ["DeepAFL (T = 5)", "DeepAFL (T = 10)", "AFL"]
    assert drawn["AFL"] == ([0.001, 10.0], [pytest.approx(89.1)] * 2)


def test_heat_map_frames_the_best_and_leaves_gaps_open():
    values = np.array([[80.0, math.nan], [82.25, 81.0]])
    figure = heat_map(values, ["a", "b"], ["c", "d"])
    axes = figure.axes[0]
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {"80.00", "–", "82.25", "81.00"}
    assert texts["82.25"].get_weight() == "bold"
    frames = [patch for patch in axes.patches if not patch.get_fill()]
    assert len(frames) == 1
    assert frames[0].get_x() < 0 < frames[0].get_x() + frames[0].get_width()
    assert frames[0].get_y() < 1 < frames[0].get_y() + frames[0].get_height()


def test_numbers_in_a_heat_map_can_be_read():
    figure = heat_map(np.linspace(50, 90, 25).reshape(5, 5), list("abcde"), list("fghij"))
    axes = figure.axes[0]
    cells = [patch for patch in axes.patches if patch.get_fill()]
    for cell, text in zip(cells, axes.texts, strict=True):
        assert _contrast(to_rgb(cell.get_facecolor()), to_rgb(text.get_color())) >= 4


def test_partitions_show_at_most_what_can_be_told_apart():
    counts = np.ones((1000, 3), dtype=int)
    panel = owners_panel("many", counts)
    assert [panel.x.named[0], panel.x.named[-1]] == [(0.0, "1"), (MOST_DOTS - 1.0, "1000")]
    axes = draw([panel]).axes[0]
    assert axes.get_title(loc="left") == f"many ({MOST_DOTS} of 1,000 clients)"
    assert len(axes.collections[0].get_offsets()) == 3 * MOST_DOTS


def test_area_of_a_dot_is_the_number_of_rows():
    axes = draw([owners_panel("two", np.array([[100, 25], [0, 50]]))]).axes[0]
    dots = zip(axes.collections[0].get_offsets().tolist(), axes.collections[0].get_sizes(), strict=True)
    areas = {tuple(place): float(size) for place, size in dots}
    assert areas[0, 1] / areas[0, 0] == pytest.approx(0.25)  # the first client's second class
    assert areas[1, 1] / areas[0, 0] == pytest.approx(0.5)
    assert len(areas) == 3


def test_even_shares_need_no_figure(tmp_path):
    text = sample_runs.NOISE.replace('kind = "dirichlet"\nalpha = 0.1', 'kind = "iid"')
    run = load_run(sample_runs.write_run(tmp_path / "even", text))
    assert [plot.name for plot in plots(run)["digits"]] == ["noise", "risk"]


# -- how they look ---------------------------------------------------------------------------------


def test_series_differ_without_colour():
    seen = {(style["marker"], str(style["linestyle"])) for style in map(series_style, range(30))}
    assert len(seen) == 30


def test_colours_stand_out_from_paper_and_print_in_different_greys():
    greys = sorted(_luminance(to_rgb(color)) for color in SERIES)
    assert all(_contrast(to_rgb(color), (1, 1, 1)) >= 3 for color in SERIES)
    assert greys[-1] > 3 * greys[0]


def test_a_series_looks_alike_wherever_others_are_missing():
    # A method that sends nothing has no place on a log axis of megabytes.
    silent = Series("other", 0, (), ())
    log = Axis("cost", log=True)
    figure = draw([Panel([silent, LINE], log, Axis("y")), Panel([OTHER, LINE], log, Axis("y"))])
    assert _color(figure.axes[0], "one") == _color(figure.axes[1], "one") == SERIES[1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["other", "one"]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The tutorial's experiment on digits, with FedAvg: clients on their own have no training accuracy."""
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    text = text.replace('"folder:images"\nbackbone = "efficientnet-lite0"', '"digits"')
    fedavg = '[[method]]\nname = "FedAvg"\nmethod = "fedavg-numpy"\nparameters = {rounds = 2}\n\n'
    before = '[[method]]\nname = "AFL"'
    assert before in text
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "mine.toml").write_text(
        text.replace(before, fedavg + before).replace("width = 256", "width = 16")
    )
    run_experiment(read_experiment(folder / "mine.toml"), folder, lambda *_: digits())
    return load_run(folder / "mine")


def test_the_legend_names_the_method_that_each_line_is_of(tutorial):
    [found] = plots(tutorial).values()
    depth = next(plot for plot in found if plot.name == "depth")
    legend = _legend(depth.figure)
    assert sorted(legend.values()) == ["AFL", "DeepAFL", "FedAvg", "local only"]
    for axes, field in zip(depth.figure.axes, ("accuracy", "train_accuracy"), strict=True):
        drawn = {legend[to_hex(line.get_color())]: list(line.get_ydata()) for line in axes.lines}
        measured: dict[str, list[list[float]]] = {}
        for cell in tutorial.cells:
            values = cell[f"{field}_per_layer"] or [cell[field]] * 2
            if cell["partition"]["name"] == "α = 0.1" and values[0] is not None:
                measured.setdefault(cell["method"], []).append([100 * value for value in values])
        assert set(drawn) == set(measured)
        for method, seeds in measured.items():
            assert drawn[method] == pytest.approx(np.mean(seeds, axis=0).tolist(), abs=1e-9), (field, method)


@pytest.mark.slow
def test_a_method_looks_alike_in_all_figures_of_its_run(tutorial, runs):
    for run in (tutorial, load_run(runs["partitions"]), load_run(runs["ablations"])):
        for found in plots(run).values():
            looks: dict[str, set[tuple[str, ...]]] = {}
            for plot in found:
                # Over other axes a depth of a method is an entry of its own.
                if plot.name in ("depth", "cost", "risk", "separability"):
                    for axes in plot.figure.axes:
                        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                            looks.setdefault(name, set()).add(_style(handle))
            assert looks
            assert all(len(styles) == 1 for styles in looks.values()), looks


def test_bars_are_standard_errors_and_missing_ones_are_zero():
    axes = lines([LINE]).axes[0]
    [bars] = axes.containers[0].lines[2]
    heights = [segment[1][1] - segment[0][1] for segment in bars.get_segments()]
    assert heights == pytest.approx([0.2, 0.0, 0.6])


def test_many_points_are_drawn_as_a_band():
    long = Series("long", 0, tuple(range(20)), tuple(range(20)), (0.5,) * 20)
    axes = lines([long]).axes[0]
    assert len(axes.collections) == 1
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((-0.5, 19.5))


def test_log_axes_have_plain_numbers():
    wide = Series("wide", 0, (0.002, 0.05, 3.0), (1.0, 10.0, 1000.0))
    axes = lines([wide], Axis("x", log=True), Axis("y", log=True)).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.01", "0.1", "1"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "10", "100", "1000"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_equal_data_give_equal_bytes(form):
    def figures_of_all_kinds():
        yield lines([LINE, OTHER])
        yield draw([Panel([LINE], Axis("x"), Axis("y"), "left"), Panel([OTHER], Axis("x"), Axis("y"))])
        for kind in ("rows", "bars", "points", "steps"):
            named = Axis.of("", ["a", "b", "c"])
            series = [Series("p", 0, (0.0, 1.0, 2.0), (1.0, 2.0, 3.0), (0.1, 0.2, 0.3))]
            yield draw([Panel(series, named, Axis("y"), kind=kind, reference="zero")])
        yield heat_map(np.eye(3), list("abc"), list("def"))
        yield draw([owners_panel("p", np.arange(12).reshape(4, 3))])

    for first, second in zip(figures_of_all_kinds(), figures_of_all_kinds(), strict=True):
        bytes_ = render(first, form)
        assert bytes_ == render(second, form)
        assert b"CreationDate" not in bytes_
        assert b"dc:date" not in bytes_


# -- files and command -----------------------------------------------------------------------------

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_files_are_named_after_run_dataset_and_figure(runs, tmp_path, form):
    written = write_figures([runs["ridge"]], tmp_path / "out", form)
    assert [path.name for path in written] == [
        f"ridge-digits-{name}.{form}" for name in ("partition", "parameter-ridge", "cost", "depth", "risk")
    ]
    assert all(path.read_bytes().startswith(MAGIC[form]) for path in written)


def test_names_of_files_are_plain():
    assert slug("Table 1: α = 0.1 / <x>") == "table-1-0-1-x"
    assert slug("αβγ") == "run"


def test_command_writes_figures_and_says_where(runs, tmp_path):
    out = tmp_path / "drawn"
    result = CliRunner().invoke(figures, [str(runs["noise"]), "--out", str(out), "--format", "svg"])
    assert result.exit_code == 0, result.output
    assert f"3 figures in {out}" in result.output
    assert sorted(path.name for path in out.iterdir()) == [
        "noise-digits-noise.svg",
        "noise-digits-partition.svg",
        "noise-digits-risk.svg",
    ]


def test_command_refuses_a_file_as_folder(runs, tmp_path):
    (tmp_path / "taken").write_text("here")
    result = CliRunner().invoke(figures, [str(runs["noise"]), "--out", str(tmp_path / "taken")])
    assert isinstance(result.exception, ModelFileError)
    assert "Name a folder" in str(result.exception)


def test_a_folder_of_runs_stands_for_all_of_them(runs):
    everything = next(iter(runs.values())).parent
    assert run_folders((str(everything), str(runs["noise"]))) == sorted(runs.values())
    assert run_folders(("nowhere",)) == [Path("nowhere")]


def _legend(figure):
    """What the legend calls the lines of each colour; the first looks all differ in it."""
    [legend] = figure.legends
    colors = [to_hex(to_rgba_array(handle.get_color())[0]) for handle in legend.legend_handles]
    names = dict(zip(colors, (text.get_text() for text in legend.get_texts()), strict=True))
    assert len(names) == len(colors)
    return names


def _style(handle):
    """Marker and dash of a line, or of the line of an error bar; a line by itself is in ink."""
    line = handle.lines[0] if hasattr(handle, "lines") else handle
    return line.get_marker(), str(line._unscaled_dash_pattern)


def _color(axes, name):
    handles, names = axes.get_legend_handles_labels()
    handle = handles[names.index(name)]
    return (handle.lines[0] if hasattr(handle, "lines") else handle).get_color()


def _luminance(rgb):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first, second):
    """WCAG contrast ratio of two colours."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)
