"""The report: one file that needs nothing else, says what the cells say, and works in a real browser."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from fedsolve.cli.experiment import report as report_command
from fedsolve.errors import DataError, ModelFileError
from fedsolve.experiments.findings import findings, overall
from fedsolve.experiments.outcomes import packed, unpacked
from fedsolve.experiments.report_page import report, table_html, write_report
from fedsolve.experiments.result_tables import ResultTable, Row, TableCell, tables_of
from fedsolve.experiments.run_folder import load_run
from tests import browser, sample_runs

pytestmark = pytest.mark.slow  # an experiment is run for it

VOID = {"meta", "br", "col", "hr", "link"}
HOSTILE = '</title><script>alert("x")</script> & <b>'


class Outline(HTMLParser):
    """Elements, identifiers, headings and references of a page; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.headings, self.links, self.tags = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        values = dict(attributes)
        self.tags.append((name, values))
        if "id" in values:
            self.ids.append(values["id"])
        if values.get("href", "").startswith("#"):
            self.links.append(values["href"][1:])
        if re.fullmatch("h[1-6]", name):
            self.headings.append(int(name[1]))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {path.name: path for path in sample_runs.write_all(tmp_path_factory.mktemp("runs"))}


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(list(runs.values()), path)
    return path


@pytest.fixture(scope="module")
def text(page):
    return page.read_text(encoding="utf-8")


# -- the file --------------------------------------------------------------------------------------


def test_it_refers_to_nothing_outside_itself(text):
    assert not re.search(r"https?:|//[a-z]+\.|@import|<link|<img|<iframe|\bsrc\s*=", text)
    for address in re.findall(r"url\(([^)]*)\)", text):
        assert address.startswith("#")
    for address in re.findall(r'href="([^"]*)"', text):
        assert address.startswith(("#", "data:text/csv"))


def test_it_is_well_formed_and_its_references_lead_somewhere(text):
    outline = Outline(text)
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.links) <= set(outline.ids)
    used = re.findall(r"url\(#([^)]*)\)", text)
    assert used
    assert set(used) <= set(outline.ids)


def test_headings_never_skip_a_level(text):
    levels = Outline(text).headings
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_drawing_is_told_in_words_and_every_table_has_a_caption(text):
    outline = Outline(text)
    drawings = [values for name, values in outline.tags if name == "svg"]
    assert len(drawings) == text.count("<figcaption>") >= 25
    assert all(values["role"] == "img" and len(values["aria-label"]) > 60 for values in drawings)
    assert text.count("<caption>") == text.count("<table") == text.count("</table>")
    assert '<html lang="en">' in text


def test_drawings_leave_colours_and_fonts_to_the_page(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S))
    assert "var(--ink)" in drawings
    assert "var(--series-3)" in drawings
    assert "font-family" not in drawings
    # White would shine through on a dark page.
    assert not re.search(r"fill: (#ffffff|white)", drawings)


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(runs, tmp_path):
    paths = [tmp_path / name for name in ("one.html", "two.html")]
    for path in paths:
        write_report([runs["ridge"], runs["noise"]], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_words_from_files_cannot_become_markup(tmp_path):
    quoted = json.dumps(HOSTILE)
    hostile = sample_runs.NOISE.replace('title = "Flipped labels"', f"title = {quoted}\nnotes = {quoted}")
    hostile = hostile.replace('name = "AFL"', f"name = {quoted}").replace(
        'name = "digits"', f"name = {quoted}"
    )
    path = sample_runs.write_run(tmp_path / "<b>run", hostile)
    told = report([load_run(path)], title=HOSTILE)
    assert "<script>alert" not in told
    assert "<b>run" not in told
    assert told.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;") > 5
    assert Outline(told).headings[0] == 1


# -- what it says ----------------------------------------------------------------------------------


def test_every_experiment_has_its_section_in_order(text, runs):
    titles = [load_run(path).experiment.title for path in runs.values()]
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", text) == titles
    for title in titles:
        assert f">{title}</a>" in text.split("<main>")[0]


def test_partitions_are_told_apart_from_methods(runs):
    found = findings(load_run(runs["partitions"]))
    assert list(found) == ["CIFAR-10", "digits <8 x 8> & more"]
    first, best, depth = (sentence.replace("\u00a0", " ") for sentence in found["CIFAR-10"])
    assert first == (
        "AFL and DeepAFL read the same test rows correctly on all 5 partitions; "
        "the partition moves FedAvg by up to 8.0 points."
    )
    assert re.fullmatch(
        r"DeepAFL \(T = 20\) is best with 91\.\d\d ± 0\.\d\d % over all partitions, 2\.\d points above AFL; "
        r"p < 0\.001\.",
        best,
    )
    assert re.fullmatch(r"Depth takes the accuracy of DeepAFL from 89\.\d to 91\.\d % \(20 layers\)\.", depth)


def test_the_error_of_a_mean_over_partitions_is_that_of_the_seeds(runs):
    run = load_run(runs["partitions"])
    [table] = tables_of(run)
    row = next(row for row in table.rows if row.label.startswith("DeepAFL (T = 20), CIFAR-10"))
    told = findings(run)["CIFAR-10"][1].replace("\u00a0", " ")
    assert f"with {row.entries[0].mean:.2f} ± {row.entries[0].error:.2f} %" in told


def test_one_changed_row_ends_the_claim_of_invariance(tmp_path):
    path = sample_runs.write_run(tmp_path / "moved", sample_runs.CLIENTS)
    lines = (path / "cells.jsonl").read_text().splitlines()
    cells = [json.loads(line) for line in lines]
    moved = next(cell for cell in cells if cell["method"] == "AFL")
    hits = unpacked(moved["hits"][""], moved["test_rows"])
    hits[0] ^= 1
    moved |= {"hits": {"": packed(hits)}, "accuracy": float(hits.mean())}
    (path / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    run = load_run(path)
    assert findings(run)[""][0].startswith("DeepAFL reads the same test rows correctly on all 3")
    assert next(overall([run])).startswith("In 1 of 2 comparisons")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "ridge",
            r"DeepAFL is best at λ = 0\.1 with 90\.\d\d ± 0\.\d\d %; over the 5 settings .* 0\.6 points\.",
        ),
        (
            "widths",
            r"DeepAFL is best at d = 512 and d_F = 1024 with .*; over the 20 settings .* 3\.5 points\.",
        ),
        ("activation", r"DeepAFL is best at gelu with .*; over the 4 settings tried, .* 2\.0 points\."),
        (
            "noise",
            r"40 % flipped labels instead of 0 % cost AFL 4\.8 points \(89\.1 to 84\.3 %\) and .*",
        ),
        ("ablations", r"DeepAFL \(T = 20\) is best with .*, 1\.\d points above no \w+ .*; p = 0\.0\d+\."),
    ],
)
def test_each_experiment_opens_with_what_it_is_about(runs, name, expected):
    [sentences] = findings(load_run(runs[name])).values()
    assert re.fullmatch(expected, sentences[0].replace("\u00a0", " "))


def test_a_difference_that_may_be_chance_is_called_so(tmp_path):
    path = sample_runs.write_run(
        tmp_path / "close", sample_runs.ABLATIONS.replace("20", "1").replace("[5, 10, 1]", "[1]")
    )
    told = " ".join(findings(load_run(path))[""]).replace("\u00a0", " ")
    assert re.search(r"0\.\d points above [^;]*, which may be chance; p = 0\.\d+\.", told)


def test_separability_is_told_for_each_method(runs):
    told = findings(load_run(runs["ablations"]))[""][-1]
    assert told.startswith("CSR of the test rows (lower is better) goes from 0.96 to 0.181 for DeepAFL, ")


def test_a_single_model_is_told_with_its_cost(tmp_path):
    text = sample_runs.NOISE.split("[[method]]")[0].replace("[0.0, 0.1, 0.2, 0.4]", "[0.0]")
    text += (
        '[[method]]\nname = "AFL"\nmethod = "afl"\n'
        + sample_runs.NOISE[sample_runs.NOISE.index("\n[[partition]]") :]
    )
    told = findings(load_run(sample_runs.write_run(tmp_path / "one", text)))[""][0].replace("\u00a0", " ")
    assert told == (
        "AFL reaches 89.10 ± 0.00 % in 1 exchange with 3.5 MB of traffic and 0.5 seconds of training."
    )


def test_backbones_of_one_dataset_are_compared(tmp_path):
    text = sample_runs.NOISE.replace("[0.0, 0.1, 0.2, 0.4]", "[0.0]")
    text += '\n[[dataset]]\nname = "digits"\naddress = "digits"\nbackbone = "pixels:4"\n'
    told = findings(load_run(sample_runs.write_run(tmp_path / "two", text)))[""]
    assert told[0].replace("\u00a0", " ") == (
        "On digits AFL reaches 89.10 ± 0.00 % through pixels and 89.10 ± 0.00 % through pixels:4."
    )


def test_missing_cells_are_told(text, runs):
    assert "2 cells of 18 have not been run yet; the others are shown here." in text
    assert "16 finished, 2 missing" in text
    assert "2 cells are still to be run." in text


def test_a_run_without_cells_is_told_too(tmp_path):
    path = sample_runs.write_run(tmp_path / "none", sample_runs.NOISE, leave_out=16)
    told = report([load_run(path)])
    assert "16 cells of 16 have not been run yet; there is nothing to show." in told
    assert "<figure" not in told


def test_papers_numbers_stand_in_the_same_cell(text):
    row = re.search(r"<tr><th scope=\"row\">AFL, CIFAR-10</th>(.*?)</tr>", text, re.S)[1]
    cells = re.findall(r"<td.*?</td>", row, re.S)
    assert '<span class="paper">paper 80.75 ± 0.00</span>' in cells[1]
    assert "paper" not in cells[0]
    other = re.search(r"<tr><th scope=\"row\">AFL, digits(.*?)</tr>", text, re.S)[1]
    assert "paper" not in other  # Table 2 is about CIFAR-10
    assert float(re.search(r'data-value="([^"]*)"', cells[1])[1]) == pytest.approx(89.1)


def test_significance_is_marked_with_its_p_value(text):
    assert re.search(r'<abbr class="star" title="differs from AFL: p = [\d.e-]+">\*</abbr>', text)


def test_provenance_names_versions_machine_seeds_and_times(text):
    for expected in (
        "fedsolve 0.1.0, numpy 2.0.0",
        "Example CPU at 3 GHz, 2 cores, Linux x86_64",
        "<dt>Seeds</dt><dd>0, 1, 2</dd>",
        "2026-02-01 10:",
        "50,000 training and 10,000 test rows, 512 features, 10 classes, backbone pixels",
        "fedsolve experiment run partitions.toml",
    ):
        assert expected in text


def test_configuration_is_the_file_that_was_run(text):
    assert "alpha = 0.01" in text
    assert "name = &#34;digits &lt;8 x 8&gt; &amp; more&#34;" in text


def test_the_best_of_a_column_is_bold_and_a_paper_never():
    rows = (
        Row("AFL", (TableCell("test", 90.0, None, 1, printed={"1": TableCell("test", 99.0, None)}),)),
        Row("DeepAFL", (TableCell("test", 91.0, 0.5, 2, 0.01),)),
    )
    first, second = cells_of(ResultTable("T", "method", ("α = 0.1",), rows, ()), "AFL")
    assert first.endswith('>90.00<span class="paper">paper 99.00</span>')
    assert '<strong>91.00<span class="error"> ± 0.50</span>' in second
    assert 'title="differs from AFL: p = 0.01"' in second


def test_a_papers_numbers_keep_the_digits_it_printed():
    theirs = {"9": TableCell("seconds", 279.68, 0.14)}
    rows = (Row("AFL", (TableCell("seconds", 100.25, 0.004, 3, printed=theirs),)),)
    [ours] = cells_of(ResultTable("T", "method", ("seconds",), rows, ()))
    assert '100.250<span class="error"> ± 0.004</span><span class="paper">paper 279.68 ± 0.14</span>' in ours


def test_a_place_without_a_value_sorts_as_empty():
    rows = (Row("a", (None, TableCell("test", None, None, 3))),)
    empty, unmeasured = cells_of(ResultTable("T", "method", ("x", "y"), rows, ()))
    assert empty == '<td class="number">'
    assert unmeasured == '<td class="number" data-value="">–'


def cells_of(table, baseline=None):
    return re.findall(r"(<td.*?)</td>", table_html(table, "1", baseline), re.S)


def test_csv_has_the_exact_numbers(runs, text):
    [table] = tables_of(load_run(runs["noise"]))
    lines = list(csv.reader(io.StringIO(table.to_csv())))
    assert lines[0][:4] == ["method", "τ = 0 %", "τ = 0 % standard error", "τ = 0 % seeds"]
    entry = table.rows[1].entries[0]
    assert [float(value) for value in lines[2][1:3]] == [entry.mean, entry.error]
    links = [unquote(link) for link in re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', text)]
    assert table.to_csv() in links


def test_partitions_are_shown_once(text):
    assert text.count("Who owns which class.</b>") == 3


# -- command ---------------------------------------------------------------------------------------


def test_command_writes_the_page_and_tells_its_size(runs, tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(
        report_command, [str(runs["noise"]), "--out", str(out), "--title", "Noise & more"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"1 run in {out} (")
    assert "<title>Noise &amp; more</title>" in out.read_text(encoding="utf-8")
    result = CliRunner().invoke(report_command, [str(runs["noise"]), "--out", str(out), "--json"])
    assert json.loads(result.output) == {
        "runs": [str(runs["noise"])],
        "out": str(out),
        "bytes": out.stat().st_size,
    }


def test_command_names_a_folder_that_is_no_run(tmp_path):
    result = CliRunner().invoke(report_command, [str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert isinstance(result.exception, ModelFileError)
    assert "is not a run" in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_no_runs_are_refused():
    with pytest.raises(DataError, match="at least one run"):
        report([])


# -- in a browser ----------------------------------------------------------------------------------

SORTED = """
(() => {
  const problems = [];
  for (const table of document.querySelectorAll("table.results")) {
    const heads = [...table.tHead.rows[0].cells];
    const before = [...table.tBodies[0].rows].map((row) => row.textContent).sort().join("|");
    heads.forEach((head, column) => {
      for (let click = 0; click < 2; click += 1) {
        head.querySelector("button").click();
        const order = head.getAttribute("aria-sort");
        const expected = (head.classList.contains("number") ? ["descending", "ascending"]
                                                            : ["ascending", "descending"])[click];
        if (order !== expected) problems.push(`${table.id} ${column}: ${order}`);
        if (heads.filter((each) => each.hasAttribute("aria-sort")).length !== 1) problems.push("two orders");
        if (!head.classList.contains("number")) continue;
        const values = [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.value ?? "");
        const numbers = values.filter((value) => value !== "").map(Number);
        if (values.slice(numbers.length).some((value) => value !== "")) problems.push("empty not last");
        const sign = order === "ascending" ? 1 : -1;
        if (numbers.some((value, i) => i > 0 && sign * (value - numbers[i - 1]) < 0))
          problems.push(`${table.id} ${column} ${order}: ${numbers}`);
      }
    });
    const after = [...table.tBodies[0].rows].map((row) => row.textContent).sort().join("|");
    if (after !== before) problems.push(`${table.id}: rows changed`);
  }
  return problems;
})()
"""

CONTRASTS = """
(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("script, svg")) continue;
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance).sort((x, y) => x - y);
    const ratio = (b + 0.05) / (a + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(low)];
})()
"""


@pytest.fixture(scope="module")
def chromium():
    if browser.FOUND is None:
        pytest.skip(browser.MISSING)
    with browser.Browser() as running:
        yield running


@pytest.mark.browser
def test_page_loads_alone_and_without_complaint(chromium, page, runs):
    opened = chromium.open(page)
    assert opened.problems() == []
    assert opened.requests() == [page.resolve().as_uri()]
    assert opened.evaluate("document.querySelectorAll('section.experiment').length") == len(runs)
    assert opened.evaluate("[...document.querySelectorAll('svg')].every(s => s.getBBox().width > 100)")


@pytest.mark.browser
def test_browser_helper_sees_complaints_and_requests(chromium, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<!doctype html><img src="missing.png"><script>console.error("no"); nothing();</script>')
    opened = chromium.open(bad)
    assert len(opened.problems()) >= 3
    assert len(opened.requests()) == 2


@pytest.mark.browser
def test_every_column_of_every_table_sorts_both_ways(chromium, page):
    opened = chromium.open(page)
    assert opened.evaluate("document.querySelectorAll('table.results thead button').length") > 40
    assert opened.evaluate(SORTED) == []
    assert opened.problems() == []


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_page_follows_the_system_until_the_reader_chooses(chromium, page, dark):
    opened = chromium.open(page, dark=dark)
    shown = "getComputedStyle(document.body).backgroundColor"
    button = "document.querySelector('.theme')"
    light_page, dark_page = "rgb(251, 250, 247)", "rgb(20, 22, 26)"
    assert opened.evaluate(shown) == (dark_page if dark else light_page)
    assert opened.evaluate(f"{button}.textContent") == ("Light page" if dark else "Dark page")
    opened.evaluate(f"{button}.click()")
    assert opened.evaluate(shown) == (light_page if dark else dark_page)
    assert opened.evaluate(f"{button}.textContent") == ("Dark page" if dark else "Light page")
    opened.evaluate(f"{button}.click()")
    assert opened.evaluate(shown) == (dark_page if dark else light_page)
    ink = "getComputedStyle(document.querySelector('.plot text')).fill"
    assert opened.evaluate(ink) == ("rgb(231, 229, 223)" if dark else "rgb(34, 37, 42)")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_enough_contrast(chromium, page, dark):
    opened = chromium.open(page, dark=dark)
    opened.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert opened.evaluate(CONTRASTS) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 800, 1440])
def test_page_is_never_wider_than_its_window(chromium, page, width):
    opened = chromium.open(page, width=width, height=800)
    opened.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.browser
def test_printing_unfolds_everything_on_white_paper(chromium, page):
    opened = chromium.open(page, dark=True)
    opened.evaluate(
        "window.opened = 0; addEventListener('beforeprint', () => {"
        "  window.opened = document.querySelectorAll('details[open]').length;"
        "})"
    )
    assert opened.pdf().startswith(b"%PDF")
    assert (
        opened.evaluate("window.opened")
        == opened.evaluate("document.querySelectorAll('details').length")
        > 10
    )
    assert opened.evaluate("document.querySelectorAll('details[open]').length") == 0
    opened.send("Emulation.setEmulatedMedia", media="print")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.evaluate("getComputedStyle(document.querySelector('.theme')).display") == "none"


@pytest.mark.browser
def test_page_can_be_read_without_scripts(chromium, page):
    opened = chromium.open(page, scripts=False)
    assert opened.problems() == []
    assert opened.text().count("Test accuracy in per cent.") >= 6
    assert "Dark page" not in opened.text()


@pytest.mark.browser
def test_contents_lead_to_sections_and_show_where_the_reader_is(chromium, page):
    opened = chromium.open(page)
    opened.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    opened.evaluate("document.querySelectorAll('.contents a')[3].click()")
    waited = (
        "new Promise(done => { const look = () => {"
        "  const now = document.querySelector('.contents a[aria-current]');"
        "  if (now) done(now.textContent); else requestAnimationFrame(look); }; look(); })"
    )
    title = opened.evaluate("document.querySelectorAll('section h2')[3].textContent")
    assert opened.evaluate(waited) == title
    top = opened.evaluate("document.querySelectorAll('section')[3].getBoundingClientRect().top")
    assert 0 <= top < 100
