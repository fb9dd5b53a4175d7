"""What each view shows, how it stays live, and what viewers cost."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from anyio.to_thread import current_default_thread_limiter
from celery.schedules import crontab
from click.testing import CliRunner

from singlebeat import Schedule, web
from singlebeat.beat.status import ScheduleStatus
from singlebeat.cli import main
from singlebeat.diagnosis.workers import BrokerError, Workers
from singlebeat.web.poller import Poller
from singlebeat.web.render import instant
from singlebeat.web.server import MOST_ASKING
from singlebeat.web.site import ASKING_WORKERS
from tests.redis.conftest import bench, bench_on  # noqa: F401 - fixtures
from tests.support import APP, at_once, free_port, without

LIVE = {"HX-Request": "true"}
VIEWS = ("/", "/entry?name=e", "/history", "/locks", "/doctor", "/quarantine", "/changes")
PLAIN = f"{APP}.plain"


@pytest.fixture
def page(visit):
    """A visitor of the page."""
    return visit()


@pytest.fixture
def entries(app, redis) -> Schedule:
    """The entries of the app, of which there is one."""
    entries = Schedule(app)
    entries.upsert("e", PLAIN, crontab(minute=0, hour=3), timezone="Europe/Berlin", tags=["billing"])
    return entries


@pytest.mark.parametrize("path", [*VIEWS, "/why?name=e", "/findings"])
def test_every_view_is_a_whole_page_without_a_script(page, entries, path):
    answer = page.get(path)

    assert answer.status_code == 200
    assert answer.text.startswith("<!doctype html>")
    assert "<h" in answer.text or "<table" in answer.text


def test_the_header_says_who_leads_and_what_waits(visit, bench):  # noqa: F811
    bench.tick()

    text = visit(of=bench.app).get("/").text

    status = text[text.index('id="status"') : text.index('id="lost"')]
    shown = " ".join(re.sub(r"<[^>]+>", " ", status).split())
    assert re.search(r"\S+:\d+ leads term 1, since .* 0 standbys .* lag 0 s 0 pending 0 quarantined", shown), shown


def test_a_locks_server_that_is_dead_is_said_to_be_so(visit, server, bench_on):  # noqa: F811
    """Whether an entry's lock is free is not known then."""
    fleet = bench_on(server, singleton_backend_url=f"redis://127.0.0.1:{free_port()}/0")
    fleet.put(ago=timedelta())
    fleet.tick()
    page = visit(of=fleet.app)

    assert re.search(r"<small>Lock</small><strong[^>]*>unknown<", page.get("/entry?name=e").text)
    assert "the locks' server" in page.get("/api/status").json()["problem"]


def test_without_a_leader_the_header_is_red(page, entries):
    text = page.get("/").text

    assert re.search(r'id="status"[^>]*class="wrong"', text)
    assert "No beat leads" in text


def test_the_header_names_a_refusal_before_an_entry_is_overdue(visit, bench, server):  # noqa: F811
    bench.tick()
    with without(server, "xadd") as mute:
        conf = {"redbeat_redis_url": mute.replace("redis+socket", "unix")}
        page = visit(of=bench.new_app(**conf))
        shown, told = page.get("/").text, page.get("/api/status").json()["problem"]

    for text in (shown, told):
        assert "the ACL of its user lacks XADD: grant +xadd (docs, Rights)" in text
    assert 'class="wrong"' in shown
    assert ScheduleStatus.of(bench.app).leader
    assert ScheduleStatus.of(bench.app).overdue == 0


def test_a_read_only_page_needs_no_right_to_write(visit, bench, server):  # noqa: F811
    bench.tick()
    with without(server, "set") as mute:
        app = bench.new_app(redbeat_redis_url=mute.replace("redis+socket", "unix"))
        text = visit(of=app, read_only=True).get("/").text

    assert "lacks SET" not in text
    assert 'class="wrong"' not in text


def test_the_server_is_asked_for_refusals_once_in_ten_seconds(app, redis, monkeypatch):
    times, asked = [0.0], []
    monkeypatch.setattr("singlebeat.web.poller.ticks_refusal", lambda _: asked.append(times[0]) or "it refuses")
    poller = Poller(app, clock=lambda: times[0])
    for second in range(25):
        times[0] = float(second)
        assert poller.snapshot().problem == "it refuses"

    assert asked == [0.0, 10.0, 20.0]


def test_the_header_shows_that_the_schedule_was_lost(visit, bench):  # noqa: F811
    bench.tick()
    bench.schedulers[-1]._note_loss("the server has forgotten term 7")
    page = visit(of=bench.app)

    assert re.search(r'class="wrong".{,200}The server has lost the schedule', page.get("/").text, re.DOTALL)
    assert "has forgotten term 7" in page.get("/api/status").json()["problem"]


def test_the_list_says_what_ran_last_and_what_runs_next(visit, bench):  # noqa: F811
    bench.put("due", ago=timedelta(hours=1.5))
    bench.tick()

    text = visit(of=bench.app).get("/").text

    row = text[text.index('aria-label="Select due"') : text.index("</tr>", text.index('aria-label="Select due"'))]
    assert 'class="open"' in row, "the strip has its run"
    assert "Every hour" in row
    assert re.search(r"<time [^>]*>in \d+ min", row)


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("q=PLAIN", {"e"}),
        ("q=nothing", set()),
        ("tag=billing", {"e"}),
        ("state=paused", {"p"}),
        ("task=other", {"p"}),
        ("sort=name", {"e", "p"}),
        ("sort=; drop", {"e", "p"}),
    ],
)
def test_the_list_is_filtered_on_the_server(page, entries, query, shown):
    entries.upsert("p", "other", 60, paused=True)

    found = re.findall(r'<a class="name" href="/entry\?name=(\w+)"', page.get(f"/?{query}").text)

    assert set(found) == shown


def test_the_list_is_paged_on_the_server(page, entries):
    for number in range(5):
        entries.upsert(f"n{number}", PLAIN, 60)
    seen, path = [], "/?sort=name&size=2"
    while path:
        text = page.get(path).text
        seen += re.findall(r'<a class="name" href="/entry\?name=(\w+)"', text)
        following = re.search(r'<a href="([^"]+)" rel="next"', text)
        path = html.unescape(following[1]) if following else ""

    assert seen == ["e", "n0", "n1", "n2", "n3", "n4"]


def test_a_broken_cursor_is_a_message(page, entries):
    assert page.get("/?cursor=x").status_code == 422


@pytest.mark.parametrize("path", ["/entry?name=none", "/none", "/edit?name=none", "/why?name=none"])
def test_what_is_not_there_is_said(page, entries, path):
    assert page.get(path).status_code == 404


def test_an_entry_shows_its_runs_in_its_own_zone(page, entries):
    text = page.get("/entry?name=e").text

    assert re.search(r"03:00:00 CES?T", text)
    assert "At 03:00" in text


@pytest.mark.parametrize("choice", ["entry", "utc", "mine"])
def test_the_chosen_zone_is_kept(page, entries, choice):
    answer = page.post("/zone", data=page.form("/", zone=choice, back="/entry?name=e"), follow_redirects=False)

    assert answer.headers["location"] == "/entry?name=e"
    shown = re.search(r"03:00:00 CES?T", page.get("/entry?name=e").text)
    assert bool(shown) == (choice == "entry")


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_a_choice_never_leads_to_another_site(page, back):
    answer = page.post("/zone", data=page.form("/", zone="utc", back=back), follow_redirects=False)

    assert re.match(r"/(?![/\\])", answer.headers["location"])


def test_a_run_left_out_by_a_pause_without_a_note_says_by_whom(visit, bench):  # noqa: F811
    bench.put("held")
    Schedule(bench.app, actor="ann").pause("held")
    bench.tick()
    page = visit(of=bench.app)

    why = re.compile(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ by ann")
    for path in ("/history", "/history?name=held", "/history.csv", "/entry?name=held"):
        assert why.search(page.get(path).text), path
    for path in ("/api/history", "/api/history?name=held"):
        (record,) = page.get(path).json()["records"]
        assert record["decision"] == "paused"
        assert why.fullmatch(record["reason"]), path


def test_the_history_is_filtered_and_downloaded(visit, bench):  # noqa: F811
    bench.put("=cmd()", ago=timedelta(hours=1.5))
    bench.put("p", ago=timedelta(hours=1.5), paused=True)
    bench.tick()
    page = visit(of=bench.app)

    assert page.get("/history?outcome=paused").text.count('<th scope="row">') == 1
    assert page.get("/history.json?outcome=paused").json()[0]["entry"] == "p"
    rows = [*csv.DictReader(io.StringIO(page.get("/history.csv").text))]
    assert {row["entry"] for row in rows} == {"'=cmd()", "p"}, "no cell is a formula"


def test_a_change_is_shown_with_its_author_and_reverted(page, entries):
    page.submit("/pause?name=e", note="why")

    text = page.get("/changes?name=e").text
    assert re.search(r"<td class=\"nowrap\">page<small>web</small>", text)
    (path,) = set(re.findall(r'href="(/revert\?[^"]+)"', text))
    page.submit(html.unescape(path))
    assert not entries.get("e").policy.paused


@pytest.mark.parametrize("action", ["revert", "delete"])
def test_what_another_stores_before_the_click_is_not_undone_or_deleted(page, entries, action):
    entries.pause("e", "mine")
    path = f"/{action}?name=e&to={entries.changes('e')[0].id}"
    form = page.get(path).text[page.get(path).text.index("<form") :]
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))
    entries.pause("e", "theirs")

    answer = page.post(f"/{action}", data=fields)

    assert answer.status_code == 409
    assert "has changed the entry" in answer.text
    assert entries.get("e").policy.note == "theirs"


def test_an_entry_that_another_adds_before_the_click_is_not_replaced(page, entries):
    entries.upsert("e", PLAIN, 77)
    entries.delete("e")
    path = f"/revert?name=e&to={entries.changes('e')[0].id}"
    form = page.get(path).text[page.get(path).text.index("<form") :]
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))
    entries.upsert("e", PLAIN, 55)

    assert page.post("/revert", data=fields).status_code == 409
    assert entries.get("e").schedule.run_every.total_seconds() == 55


def test_a_revert_of_a_removed_entry_leads_to_after_its_last_change(page, entries, redis):
    entries.pause("e")
    redis.delete("redbeat:e")
    (change, *_) = entries.changes("e")

    text = page.get(f"/revert?name=e&to={change.id}").text

    assert "become what they were after this change" in text
    assert "before" not in text.partition("<form")[2]
    page.submit(f"/revert?name=e&to={change.id}")
    assert entries.get("e").policy.paused


def test_a_secret_is_masked_in_changes_and_quarantine(page, entries, redis):
    entries.upsert("e", PLAIN, 60, kwargs={"token": "s3cret"})
    entries.upsert("e", PLAIN, 60, kwargs={"token": "s4cret"})
    redis.hset("redbeat::quarantine", "redbeat:e", '{"reason": "why", "since": "2026-01-01T00:00:00+00:00"}')

    for path in ("/changes", "/quarantine", "/entry?name=e", "/history", "/"):
        assert not re.search("s[34]cret", page.get(path).text), path


def test_a_secret_argument_by_position_is_masked_in_changes(page, app, entries):
    """Each side by its own task: the other one may have other names."""

    def log_in(user: str, password: str) -> None: ...

    app.task(log_in, name="log_in", shared=False)
    for task, password in ((PLAIN, "public"), ("log_in", "s3cret"), ("log_in", "s4cret")):
        entries.upsert("e", task, 60, args=["ann", password])

    for path in ("/changes", "/entry?name=e", "/api/changes", "/api/entry?name=e"):
        text = page.get(path).text
        assert not re.search("s[34]cret", text), path
        assert "ann" in text, path


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"], ids=["half a character", "no UTF-8"])
def test_a_text_that_cannot_be_encoded_breaks_no_view(page, entries, redis, text):
    entries.upsert("e", PLAIN, 60, args=[text], kwargs={"n": text}, note=text)
    entries.upsert("e", PLAIN, 60, tags=[text])
    redis.hset("redbeat:raw", "definition", json.dumps({"task": f"{PLAIN}{text}", "schedule": 60}))
    redis.zadd("redbeat::schedule", {"redbeat:raw": 0})

    of_entries = [f"/{view}?name={name}" for view in ("entry", "edit") for name in ("e", "raw")]
    for path in ("/", *of_entries, "/changes", "/history", "/quarantine", "/api/entries"):
        assert page.get(path).status_code == 200, path


def test_a_change_of_an_impossible_time_breaks_no_view(page, entries, redis):
    redis.xadd("redbeat::changes", {"entry": "e", "action": "edit"}, id="253402300800000-0")

    for path in ("/changes", "/api/changes", "/entry?name=e"):
        assert page.get(path).status_code == 200, path


def test_many_entries_are_paused_under_one_key(page, entries):
    page.submit("/pause-all", which="tag", tag="billing", note="month end")

    text = page.get("/").text
    assert "month end" in text
    assert 'class="state paused"' in text
    page.submit("/resume-all?tag=billing")
    assert entries.pauses() == []


@pytest.mark.parametrize("path", ["/pause-all", "/pause?name=e", "/many?do=pause&name=e"])
def test_a_pause_that_was_not_shown_is_not_replaced(page, entries, path):
    """Two operators may pause at the same time, one of them without an end."""
    entries.upsert("e", PLAIN, 60)
    form = page.form(path, which="all", note="lunch", until="2100-01-01T00:00", count="1")
    entries.pause_many(note="the database is restored")
    entries.pause("e", "the database is restored")

    answer = page.post(path.partition("?")[0], data=form)

    assert answer.status_code == 409
    assert "meanwhile" in answer.text
    assert [(pause.note, pause.until) for pause in entries.pauses()] == [("the database is restored", None)]
    assert entries.get("e").policy.note == "the database is restored"
    assert "the database is restored" in page.get(path).text
    form = page.form(path, which="all", note="lunch", until="2100-01-01T00:00", count="1")
    for _ in range(2):  # as by a double click
        assert page.post(path.partition("?")[0], data=form, follow_redirects=False).status_code == 303
    assert "lunch" in {entries.pauses()[0].note, entries.get("e").policy.note}


def test_a_pause_of_many_needs_a_choice(page, entries):
    assert page.submit("/pause-all", tag="").status_code == 422
    assert entries.pauses() == []


# ------------------------------------------------------------------ live


@pytest.mark.parametrize("path", VIEWS)
def test_a_live_part_is_only_sent_if_something_has_changed(page, entries, path):
    first = page.get(path, headers=LIVE)
    again = page.get(path, headers={**LIVE, "If-None-Match": first.headers["etag"]})
    page.submit("/pause?name=e", note="why")
    changed = page.get(path, headers={**LIVE, "If-None-Match": first.headers["etag"]})

    assert (again.status_code, again.text) == (304, "")
    assert changed.status_code == 200
    assert "<html" not in changed.text
    assert 'hx-swap-oob="true"' in changed.text, "the header is live, too"


def test_the_live_part_of_a_page_is_what_the_page_shows(page, entries):
    whole, part = page.get("/?sort=name").text, page.get("/?sort=name", headers=LIVE).text

    rows = re.compile(r"<tbody>.*</tbody>", re.DOTALL)
    assert re.sub(r"<time.*?</time>", "", rows.search(whole)[0]) == re.sub(r"<time.*?</time>", "", rows.search(part)[0])


@pytest.mark.parametrize("path", ["/entry?name=e", "/why?name=e"])
def test_the_live_part_of_a_deleted_entry_says_that_it_is_gone(page, entries, path):
    shown = page.get(path, headers=LIVE)
    page.submit("/delete?name=e")
    page.app.state.site.board.poller.forget()

    gone = page.get(path, headers={**LIVE, "If-None-Match": shown.headers.get("etag", "")})

    assert gone.status_code == 200, "a script swaps no error in"
    assert gone.headers["hx-retarget"] == "#live"
    assert "There is no such entry" in gone.text
    assert "<html" not in gone.text
    assert "hx-get" not in gone.text, "it is not asked for again"
    assert page.get(path).status_code == 404


def test_ten_viewers_cost_redis_no_more_than_two(visit, app, entries, redis):
    def cost(viewers: int) -> int:
        page = visit()
        page.get("/")  # opens its connections
        redis.config_resetstat()
        page.app.state.site.board.poller.forget()
        at_once(*[lambda: page.get("/", headers=LIVE) for _ in range(viewers)])
        return redis.info("stats")["total_commands_processed"]

    assert cost(10) <= cost(2) + 2


def test_the_state_is_read_once_in_two_seconds_and_in_no_thread(app, redis):
    times, threads = [0.0], set(threading.enumerate())
    poller = Poller(app, clock=lambda: times[0])
    first = poller.snapshot()

    assert poller.snapshot() is first
    times[0] += 2.0
    assert poller.snapshot() is not first
    assert set(threading.enumerate()) <= threads


def test_what_viewers_share_is_read_once(app, redis):
    poller, reads = Poller(app), []

    def read() -> int:
        reads.append(1)
        return len(reads)

    assert at_once(*[lambda: poller.shared("key", read)] * 8) == [1] * 8


def test_what_could_not_be_read_is_not_kept(app, redis):
    poller = Poller(app)

    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        poller.shared("key", fail)
    assert poller.shared("key", lambda: 5) == 5


def test_a_page_mounted_below_a_path_stays_there(app, entries):
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    host = Starlette(routes=[Mount("/ops/beat", web.app(app))])
    with TestClient(host, base_url="http://localhost", client=("127.0.0.1", 1)) as client:
        text = client.get("/ops/beat/").text
        links = set(re.findall(r'(?:href|src|action|hx-get)="(/[^"]*)"', text))
        assert links
        assert [link for link in links if not link.startswith("/ops/beat/")] == []
        assert client.get("/ops/beat/static/page.css").status_code == 200
        token = re.search(r'name="singlebeat_token" value="([^"]+)"', client.get("/ops/beat/pause?name=e").text)[1]
        client.post("/ops/beat/pause", data={"singlebeat_token": token, "name": "e"})

    assert entries.get("e").policy.paused


def test_a_moment_in_a_page_can_be_read_by_scripts():
    when = datetime(2026, 11, 23, 8, tzinfo=UTC)

    assert instant(when) == '<time datetime="2026-11-23T08:00:00+00:00">2026-11-23 08:00:00Z</time>'
    assert "in 1 h" in instant(when, UTC, when - timedelta(hours=1))
    assert "ago" in instant(when, UTC, when + timedelta(hours=1))


# ------------------------------------------------------------------ what other programs write

ODD = (
    {"x": "y"},
    {"entry": "e", "id": "a", "nominal": "{}", "decision": "dispatched"},
    {"entry": "e", "id": "a", "nominal": "2026-01-01T00:00:00", "decision": "dispatched"},
    {"entry": "e", "nominal": "2026-01-01T00:00:00+00:00", "decision": "dispatched"},
)


@pytest.mark.parametrize("stream", ["history", "runs"])
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_record_hides_no_other_one(app, page, entries, redis, stream, odd):
    good = {"entry": "e", "id": "good", "nominal": "2026-01-02T00:00:00+00:00", "decision": "dispatched"}
    end = {"entry": "e", "id": "good", "outcome": "success", "reason": "", "started": "", "duration": "", "worker": "w"}
    for number in range(2):
        redis.xadd("redbeat::history", good | {"id": f"good {number}"})
        redis.xadd("redbeat::runs", end | {"id": f"good {number}"})
        redis.xadd(f"redbeat::{stream}", odd)

    for path in (
        "/history",
        "/history.csv",
        "/history.json",
        "/history?name=e&since=2026-01-01T00:00",
        "/entry?name=e",
    ):
        assert page.get(path).status_code == 200, path
    records = page.get("/api/history").json()["records"]
    assert [each["end"]["outcome"] for each in records if each["task_id"].startswith("good")] == ["success"] * 2
    for command in (["history"], ["history", "--json"], ["explain", "e"]):
        assert CliRunner().invoke(main, command, obj=SimpleNamespace(app=app)).exception is None, command


@pytest.mark.parametrize("key", ["history", "runs", "changes", "leader"])
def test_a_key_of_another_type_is_named_on_the_page(page, entries, redis, key):
    redis.delete(f"redbeat::{key}")
    redis.set(f"redbeat::{key}", "text")

    answer = page.get("/")

    assert answer.status_code in {200, 503}
    assert "WRONGTYPE" in answer.text or "wrong kind" in answer.text or f"redbeat::{key}" in answer.text


@pytest.mark.parametrize("option", ["misfire_grace_time", "jitter", "expires", "max_runs"])
def test_a_policy_with_a_very_large_number_is_shown_with_the_reason(page, entries, redis, option):
    redis.hset("redbeat:e", "policy", f'{{"{option}": {"9" * 400}}}')

    for path in ("/entry?name=e", "/edit?name=e", "/api/entry?name=e", "/"):
        assert page.get(path).status_code == 200, path
    assert page.get("/api/next?name=e").status_code in {200, 422}
    if option != "max_runs":
        assert f"{option} must be a positive number" in page.get("/entry?name=e").text


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("depth", [100, 300, 450, 900])
def test_deeply_nested_arguments_end_no_page(visit, entries, redis, depth, hidden):
    kwargs = '{"a":' * depth + "1" + "}" * depth
    definition = f'{{"task": "{PLAIN}", "schedule": {{"__type__": "interval", "every": 60}}, "kwargs": {kwargs}}}'
    redis.hset("redbeat:e", "definition", definition)
    page = visit(hide_arguments=hidden)

    for path in ("/entry?name=e", "/edit?name=e", "/", "/changes", "/quarantine"):
        assert page.get(path).status_code in {200, 422}, path
    for path in ("/api/entry?name=e", "/api/changes"):
        assert page.get(path).status_code in {200, 422}, path


@pytest.mark.parametrize("path", ["/why?name=e{}", "/api/explain?name=e{}"])
def test_readers_who_let_workers_be_asked_hold_up_no_other_one(visit, app, redis, monkeypatch, path):
    """Each of them occupies a thread until the workers have answered."""
    asked, answered = threading.Semaphore(0), threading.Event()

    def ask(app):
        asked.release()
        assert answered.wait(60)
        raise BrokerError("is not asked in this test")

    monkeypatch.setattr(Workers, "ask", ask)
    with visit() as page, ThreadPoolExecutor(21) as readers:
        page.portal.call(lambda: setattr(current_default_thread_limiter(), "total_tokens", MOST_ASKING))
        asking = [readers.submit(page.get, path.format(number)) for number in range(20)]
        try:
            assert all(asked.acquire(timeout=30) for _ in range(MOST_ASKING))
            assert readers.submit(page.get, "/api/status").result(30).status_code == 200
            assert not asked.acquire(blocking=False)
        finally:
            answered.set()
        assert {each.result(60).status_code for each in asking} == {404}


@pytest.mark.parametrize("path", sorted(ASKING_WORKERS))
def test_the_paths_that_let_workers_be_asked_are_paths_of_the_page(page, entries, path):
    assert page.get(path).status_code != 404 or "no such entry" in page.get(path).text.lower()
