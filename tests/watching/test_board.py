"""A run can be watched: board, page, metrics and file tell what its records tell, to this machine alone."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli import status_command
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.method import Record
from fedsolve.watching.board import Board, SiteStanding
from fedsolve.watching.loopback import StatusPage, StatusServer, html_status, metrics
from fedsolve.watching.phrases import SILENT, read_document, silent
from tests import browser
from tests.command import document, fedsolve, refused

NASTY = '<img src=x onerror="document.title=1">"\\\n'


@pytest.fixture
def federation(digits):
    owners = np.arange(300) % 3
    return fs.LocalFederation.from_arrays(digits.features[:300], digits.labels[:300], owners, workers=1)


class Certificate:
    name, days, announced = (
        "the server's certificate",
        12,
        "the server's certificate expires in 12 days. Renew it.",
    )


def of_a_server(**more) -> Board:
    board = Board("server", "deepafl over 3 sites", sites=3, **more)
    board.gathering(True, [Certificate()])
    board.sites_from(
        lambda: [
            SiteStanding("north", True, "answered"),
            SiteStanding(NASTY, True, "asked", "", 12_300_000, 40_100_000),
            SiteStanding("south", False, "missing", "too late: no answer within 60 s"),
        ]
    )
    board.note(f"remark {NASTY}")
    return board


class Within(fs.Follower):
    """Keeps what a board told before and after an exchange."""

    def __init__(self, board: Board, stop: int | None = None) -> None:
        self.board, self.stop, self.seen = board, stop, []

    def asked(self, request, expected):
        self.seen.append(self.board.document())
        if request.exchange == self.stop:
            raise DataError("the disk is full")


def test_a_board_tells_what_the_history_of_the_model_tells(federation, tmp_path):
    board = Board("training", "digits", path=tmp_path / "status.json")
    within = Within(board)
    model = fs.DeepAFL(layers=4, width=24).fit(federation, follow=(board, within))
    for number, told in enumerate(within.seen):
        before = model.history[:number]
        assert (told["exchange"], told["done"], told["phase"]) == (number + 1, number, "running")
        assert told["bytes"]["up"] == sum(record.bytes_up for record in before)
        assert told["bytes"]["down"] == sum(record.bytes_down for record in before)
        assert [entry["seconds"] for entry in told["records"]] == [record.seconds for record in before]
        assert told["under_way"]["asked"] == 3
        assert (told["seconds_left"] is None) == (number == 0)
    risks = [record.risk for record in model.history if record.risk is not None]
    last = board.document()
    assert [one["measures"]["risk"] for one in last["records"] if "risk" in one["measures"]] == risks
    assert len(risks) == 5  # of the first classifier and of each layer
    assert (last["phase"], last["under_way"], last["done"]) == ("complete", None, last["exchanges"])
    board.close()
    kept = read_document((tmp_path / "status.json").read_bytes())
    assert {name: kept[name] for name in kept if name != "now"} == {
        name: last[name] for name in last if name != "now"
    }
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o600


def test_a_run_that_stops_and_goes_on_is_told_as_one(federation, tmp_path):
    method, path, status = fs.DeepAFL(layers=3, width=16), tmp_path / "run", tmp_path / "status.json"
    board = Board("server", path=status)
    with pytest.raises(DataError, match="the disk is full"):
        method.fit(federation, path, follow=(board, Within(board, stop=3)))
    board.close()
    told = read_document(status.read_bytes())
    assert (told["phase"], told["why"], told["done"], told["starts"]) == ("stopped", "the disk is full", 3, 1)
    again = Board("server", path=status)
    within = Within(again)
    model = method.fit(federation, path, resume=True, follow=(again, within))
    assert within.seen[0]["done"] == 3
    assert within.seen[0]["bytes"]["up"] == sum(record.bytes_up for record in model.history[:3])
    again.close()
    assert read_document(status.read_bytes())["starts"] == 2
    status.write_text("{}")  # damaged: as good as none
    third = Board("server", path=status)
    assert third.document()["starts"] == 1
    third.close()


def test_a_board_that_cannot_write_stops_nothing(federation, tmp_path):
    (tmp_path / "file").write_text("")
    board = Board("training", path=tmp_path / "file" / "status.json")
    fs.AFL().fit(federation, follow=board)
    board.close()
    assert board.document()["phase"] == "complete"


def test_a_run_without_a_sign_of_life_is_not_believed():
    told = of_a_server().document()
    assert silent(told) is None
    assert silent(told, told["now"] + SILENT + 1) == pytest.approx(SILENT + 1)
    assert silent(told | {"phase": "complete"}, told["now"] + 1e6) is None


def test_a_long_run_keeps_some_hundred_records_spread_over_all_of_it():
    board = Board("training")
    for number in range(10_001):
        board.advanced(Record(number, "round", number, ("a",), {}, (), 3, 2, 0, 0.5, risk=number / 7), 20_000)
    told = board.document()
    assert (told["done"], told["bytes"]["up"]) == (10_001, 30_003)
    numbers = [one["exchange"] for one in told["records"]]
    assert 200 < len(numbers) <= 400
    assert (numbers[0], numbers[-1]) == (1, 10_001)
    assert len(set(np.diff(numbers[:-1]))) == 1
    assert [one["exchange"] for one in told["recent"]] == list(range(9_990, 10_002))


def test_metrics_are_what_prometheus_reads(federation):
    parser = pytest.importorskip("prometheus_client.parser")
    board = of_a_server()
    board.entitle(NASTY)
    within = Within(board)
    model = fs.DeepAFL(layers=2, width=16).fit(federation, follow=(board, within))
    for told in (within.seen[-1], board.document()):
        text = metrics(told)
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in families.values()
            for sample in family.samples
        }
        assert all(family.documentation for family in families.values())
        assert families["fedsolve_exchanges"].type == "counter"
        done = model.history[: told["done"]]
        assert values["fedsolve_exchanges_total",] == len(done)
        assert values["fedsolve_payload_bytes_total", "up"] == sum(record.bytes_up for record in done)
        assert values["fedsolve_payload_bytes_total", "down"] == sum(record.bytes_down for record in done)
        assert values["fedsolve_last_exchange_seconds",] == done[-1].seconds
        assert values["fedsolve_sites_connected",] == 2
        assert values["fedsolve_sites_waited_for",] == 1
        assert values["fedsolve_sites_expected",] == 3
        assert values["fedsolve_certificate_days_left", "the server's certificate"] == 12
        assert values["fedsolve_restarts_total",] == 0
        assert values["fedsolve_phase", told["phase"]] == 1
        (info,) = families["fedsolve_info"].samples
        assert info.labels["title"] == NASTY  # whatever it is called, it is read back
        assert "north" not in text  # who takes part is nobody's business where metrics go
    assert ("fedsolve_exchange_under_way_seconds",) not in values


def test_the_page_is_for_this_machine_alone():
    board = of_a_server()
    with StatusServer(board.document) as server:
        port = int(server.address.rsplit(":", 1)[1].strip("/"))

        def call(path="/", host=f"127.0.0.1:{port}", method="GET"):
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            link.putrequest(method, path, skip_host=True)
            if host is not None:
                link.putheader("Host", host)
            link.endheaders()
            answer = link.getresponse()
            return answer.status, answer.read().decode(), answer.headers

        for host in (f"localhost:{port}", "127.0.0.1", "[::1]:80", "LOCALHOST:8000"):
            assert call(host=host)[0] == 200
        for host in (
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "",
            None,
            "localhost.evil:1",
            "@127.0.0.1",
        ):
            for path in ("/", "/metrics", "/status.json"):
                status, text, _ = call(path, host)
                assert status == 403
                assert "north" not in text
        status, text, headers = call()
        assert status == 200
        assert "<img" not in text  # names and remarks are text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Access-Control-Allow-Origin"] is None
        assert "Python" not in headers["Server"]
        assert call("/status.json")[2]["Content-Type"] == "application/json"
        assert call("/else")[0] == 404
        assert call(method="POST")[0] == 501
        assert call(method="HEAD")[1] == ""
        with pytest.raises(CohortError, match="Choose another port"):
            StatusServer(board.document, port)
        with StatusServer.preferably(board.document, port) as other:
            assert other.address != server.address
        assert server.server_address[0] == "127.0.0.1"  # nowhere else
        server.looked = -1e9  # nobody looks any more


def test_a_page_that_cannot_be_made_says_so_and_stops_nothing(caplog):
    def broken():
        raise RuntimeError("no")

    with StatusServer(broken) as server, pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(server.address)
    assert "cannot be made" in caplog.text


def test_status_on_the_terminal(federation, tmp_path):
    board = of_a_server(path=tmp_path / "status.json")
    fs.DeepAFL(layers=2, width=16).fit(federation, follow=(board, within := Within(board)))
    board.close()
    (tmp_path / "status.json").write_text(json.dumps(within.seen[-1] | {"now": time.time()}))
    done = fedsolve("status", tmp_path)
    assert done.exit_code == 0, done.stderr
    for words in (
        "exchange 5 of 5",
        "waiting: 12.3 of 40.1 MB",
        "too late",
        "2 of 3",
        "expires in 12 days",
        "risk",
    ):
        assert words in done.stdout
    assert "\x1b" not in done.stdout
    assert document("status", tmp_path)["sites"][1]["name"] == NASTY
    (tmp_path / "status.json").write_text(json.dumps(within.seen[-1] | {"now": time.time() - 100}))
    late = fedsolve("status", tmp_path, "--once")
    assert late.exit_code == 3
    assert "No sign of life for 2 min" not in late.stdout
    assert "No sign of life for 1 min 40 s" in late.stdout
    with StatusServer(board.document) as server:
        port = server.address.rsplit(":", 1)[1].strip("/")
        assert document("status", port)["phase"] == "running"  # a server has more to do than to train
    refused(fedsolve("status", port, "--once"), 3, f"127.0.0.1:{port} shows no run")
    refused(fedsolve("status", tmp_path / "none"), 4, "has no status of a run", "the port of a page")
    (tmp_path / "status.json").write_text('{"form": 99}')
    refused(fedsolve("status", tmp_path), 4, "another version of fedsolve")


def test_status_follows_a_run_to_its_end(monkeypatch, capsys):
    board = of_a_server()
    server = StatusServer(board.document)
    port = server.address.rsplit(":", 1)[1].strip("/")
    looks = iter((board.document, board.complete, board.document))
    look = status_command._look

    def looking(where):
        next(looks)()
        return look(where)

    monkeypatch.setattr(status_command, "_look", looking)
    last = status_command._follow(port, board.document(), 0.01)
    assert last["phase"] == "complete"
    assert "waiting: 12.3 of 40.1 MB" in capsys.readouterr().out
    board._state["phase"] = "running"
    monkeypatch.setattr(status_command, "_look", look)
    monkeypatch.setattr(status_command, "_AWAY", 0.2)
    server.close()
    with pytest.raises(CohortError, match="shows no run"):
        status_command._follow(port, board.document(), 0.05)


def test_training_and_experiments_can_be_watched(tmp_path, monkeypatch):
    told: list[dict] = []
    advanced = StatusPage.advanced

    def look(page, record, expected):
        advanced(page, record, expected)
        with urllib.request.urlopen(f"{page.address}status.json") as answer:
            told.append(json.load(answer))

    monkeypatch.setattr(StatusPage, "advanced", look)
    words = ("--method", "deepafl", "--layers", "2", "--width", "16", "--no-calibrate", "--clients", "4")
    done = fedsolve("train", "digits", *words, "--watch")
    assert done.exit_code == 0, done.stderr
    assert "progress: http://127.0.0.1:" in done.stderr
    assert [one["done"] for one in told] == list(range(1, len(told) + 1))
    assert {(one["what"], one["title"], one["clients"]) for one in told} == {
        ("training", "deepafl on digits", 4)
    }
    told.clear()
    (tmp_path / "small.toml").write_text(
        'name = "small"\ntitle = "t"\nseeds = [0, 1]\n[dataset]\naddress = "digits"\n'
        '[[partition]]\nkind = "iid"\nclients = 3\n[[method]]\nname = "AFL"\nmethod = "afl"\n'
    )
    ends: list[dict] = []
    monkeypatch.setattr(
        StatusPage, "close", lambda page: (ends.append(page.document()), page._server.close())
    )
    done = fedsolve("experiment", "run", tmp_path / "small.toml", "--runs", tmp_path / "runs", "--watch")
    assert done.exit_code == 0, done.stderr
    assert [(one["what"], one["cells"]["done"], one["cells"]["total"]) for one in told] == [
        ("experiment", 0, 2),
        ("experiment", 1, 2),
    ]
    assert [(one["phase"], one["cells"]["done"]) for one in ends] == [("complete", 2)]
    (cell,) = told[1]["finished_cells"]
    assert 0.9 < cell["scores"]["accuracy"] <= 1.0
    assert cell["name"] in html_status(told[1])


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(browser.FOUND is None, reason=browser.MISSING)
def test_the_page_in_chromium(federation, tmp_path):
    board = of_a_server()
    waiting = "new Promise(done => setTimeout(done, 2500))"
    with browser.Browser() as running:
        server = StatusServer(board.document)
        fs.DeepAFL(layers=2, width=16).fit(federation, follow=(board, within := Within(board)))
        kept = within.seen[-1]
        board.document = lambda: kept | {"now": time.time()}  # type: ignore[method-assign]
        server.document = lambda: board.document()
        colours = set()
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            shown = running.open(server.address, width=width, dark=dark)
            shown.evaluate(waiting)
            assert shown.problems() == []
            assert set(shown.requests()) == {server.address}
            assert len(shown.requests()) >= 2  # it asks again by itself
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            text = shown.text()
            for words in ("exchange 5 of 5", "waiting: 12.3 of 40.1 MB", "too late", "expires in 12 days"):
                assert words in text
            assert shown.evaluate("document.querySelectorAll('figure svg').length") == 1
            assert shown.evaluate("document.querySelectorAll('img').length") == 0
            colours.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        last = running.open(server.address)
        kept |= {"phase": "complete", "under_way": None}
        server.close()  # when the page has seen the end
        last.evaluate(waiting)
        assert "complete" in last.text()
        assert "No answer since" in last.text()  # and says so
        static = tmp_path / "page.html"
        static.write_text(html_status(kept))
        assert "waiting: 12.3 of 40.1 MB" in running.open(static, scripts=False).text()
