"""Each action is taken by its form, and its effect is seen in Redis."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta
from urllib.parse import urlencode

import pytest
from celery.schedules import crontab

from singlebeat import Schedule
from singlebeat.errors import UnknownEntryError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from singlebeat.web.security import Users
from tests.redis.conftest import bench, bench_on, cli  # noqa: F401 - fixtures
from tests.support import APP, wait_until

from .test_edit import save
from .test_security import USERS

PLAIN = f"{APP}.plain"


@pytest.fixture
def schedule(app, redis) -> Schedule:
    """The entries of the app."""
    return Schedule(app)


@pytest.fixture
def e(schedule):
    """An entry that is due at night."""
    return schedule.upsert("e", PLAIN, crontab(minute=0, hour=3), args=["x"])


def test_a_run_is_requested_with_the_chosen_overlap(visit, app, redis, e):
    answer = visit().submit("/run?name=e", overlap="allow_all")

    assert answer.status_code == 303
    pending = redis.hget("redbeat:e", "pending")
    assert '"manual"' in pending
    assert '"allow_all"' in pending


def test_an_unknown_overlap_requests_no_run(visit, redis, e):
    assert visit().submit("/run?name=e", overlap="whenever").status_code == 422
    assert redis.hget("redbeat:e", "pending") is None


def test_the_form_of_a_run_marks_the_present_overlap(visit, schedule):
    schedule.upsert("e", PLAIN, 3600, overlap="buffer_one")

    assert "as the entry says: buffer_one" in visit().get("/run?name=e").text


def test_a_pause_keeps_its_note(visit, schedule, e):
    answer = visit().submit("/pause?name=e", note="until the gateway is back")

    assert answer.headers["location"] == "/entry?name=e&done=paused"
    policy = schedule.get("e").policy
    assert (policy.paused, policy.note) == (True, "until the gateway is back")


def test_a_resumed_entry_runs_again(visit, schedule, e):
    schedule.pause("e", "why")

    visit().submit("/resume?name=e")

    assert not schedule.get("e").policy.paused


def test_the_page_says_that_an_entry_was_not_paused(visit, schedule, e):
    schedule.pause("e")
    form = visit()
    form.get("/resume?name=e")
    schedule.resume("e")

    answer = form.submit("/resume?name=e")

    assert "It was not paused." in form.get(answer.headers["location"]).text


def test_a_deleted_entry_is_gone(visit, schedule, e):
    visit().submit("/delete?name=e")

    with pytest.raises(UnknownEntryError):
        schedule.get("e")


def test_a_key_that_a_deletion_leaves_is_named(visit, redis, schedule):
    redis.lpush("redbeat:b", "mine")
    redis.zadd("redbeat::schedule", {"redbeat:b": 1})
    page = visit()

    answer = page.submit("/delete?name=b")

    text = page.get(answer.headers["location"]).text
    assert "Its key <code>redbeat:b</code> stays, for it is of another program." in text
    assert redis.lrange("redbeat:b", 0, -1) == ["mine"]
    assert redis.zscore("redbeat::schedule", "redbeat:b") is None


def test_a_broken_entry_can_be_paused_and_deleted(visit, redis, schedule):
    redis.hset("redbeat:broken", mapping={"definition": "{"})
    redis.zadd("redbeat::schedule", {"redbeat:broken": 1})
    page = visit()

    page.submit("/pause?name=broken")
    assert '"paused": true' in redis.hget("redbeat:broken", "policy")
    assert page.get("/entry?name=broken").status_code == 200
    page.submit("/delete?name=broken")
    assert not redis.exists("redbeat:broken")


def test_a_backfill_shows_its_runs_before_it_begins(visit, redis, e):
    text = visit().get("/backfill?name=e&start=2026-11-01T00:00&end=2026-11-04T00:00").text

    assert "3 runs" in text
    assert "2026-11-02 03:00:00" in text
    assert redis.hget("redbeat:e", "backfill") is None


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [
        ("2026-11-04T00:00", "2026-11-01T00:00", "before"),
        ("soon", "2026-11-01T00:00", "no date and time"),
        ("0001-01-01T00:00", "9999-12-31T00:00", "limit of 1000"),
    ],
)
def test_a_backfill_that_cannot_be_says_why(visit, e, monkeypatch, start, end, why):
    monkeypatch.setattr("singlebeat.web.actions.CALCULATED_FOR", 60.0)  # for slow hosts

    assert why in visit().get("/backfill", params={"name": "e", "start": start, "end": end}).text


def test_a_backfill_whose_times_take_too_long_says_so(visit, e, monkeypatch):
    monkeypatch.setattr("singlebeat.web.actions.CALCULATED_FOR", 0.0)
    text = visit().get("/backfill?name=e&start=2026-11-01T00:00&end=2026-11-04T00:00").text

    assert "not calculated within 0 s" in text


def test_the_runs_of_a_backfill_are_handed_to_beat(visit, bench, redis):  # noqa: F811
    bench.put(every=crontab(minute=0, hour=3), ago=timedelta(minutes=1))
    page = visit(of=bench.app)
    path = "/backfill?name=e&start=2026-11-01T00:00&end=2026-11-04T00:00&overlap=allow_all"
    answer = page.submit(path)
    assert answer.headers["location"] == "/entry?name=e&done=backfill"

    def sent() -> bool:
        bench.tick()
        return [record.kind for record in Schedule(bench.app).history("e")] == ["backfill"] * 3

    wait_until(sent, what="the runs of the backfill")
    wait_until(lambda: "3 of 3 runs were handed" in page.get("/entry?name=e").text, what="the end of the backfill")


def test_a_backfill_that_ended_with_its_process_is_shown_as_unfinished(visit, redis, e, cli):  # noqa: F811
    """It was begun by the page, for example, which was deployed anew."""
    start, at, end = (f"2026-11-{day:02}T00:00:00+00:00" for day in (1, 2, 4))
    redis.hset("redbeat:e", "backfill", json.dumps({"start": start, "end": end, "at": at, "run": "r"}))

    said = cli("explain", "e").output
    page = html.unescape(visit().get("/entry?name=e").text)
    answer = visit().get("/api/backfill?name=e")
    checked = cli("doctor", code=1).output

    assert f"celery singlebeat backfill e {start} {end}" in said
    for text in (said, page, answer.json()["detail"], checked):
        assert "2026-11-04 00:00:00+00:00 is not finished: beat has the runs up to 2026-11-02" in text
    assert answer.status_code == 404


def test_a_backfill_whose_progress_cannot_be_read_is_shown_with_a_remedy(visit, redis, e, cli):  # noqa: F811
    redis.hset("redbeat:e", "backfill", "{")

    said, checked = cli("explain", "e").output, cli("doctor", code=1).output

    for text in (said, checked, html.unescape(visit().get("/entry?name=e").text)):
        assert "its field backfill cannot be read, HDEL redbeat:e backfill" in text


def test_a_backfill_whose_list_has_changed_is_not_begun(visit, redis, e):
    answer = visit().submit("/backfill?name=e&start=2026-11-01T00:00&end=2026-11-04T00:00", count="2")

    assert answer.status_code == 409
    assert redis.hget("redbeat:e", "backfill") is None


def test_the_end_of_a_term_lets_another_beat_lead(visit, bench, redis):  # noqa: F811
    bench.tick()
    assert redis.exists("redbeat::lock")

    assert visit(of=bench.app).submit("/resign").status_code == 303
    assert not redis.exists("redbeat::lock")


def test_without_a_leader_no_term_can_be_ended(visit, redis):
    answer = visit().submit("/resign")

    assert answer.status_code == 409
    assert "no beat leads" in answer.text


@pytest.mark.parametrize("what", ["pause", "resume", "run", "delete"])
def test_several_entries_change_only_if_their_number_is_typed(visit, redis, schedule, what):
    names = ["a", "b", "c/d"]
    for name in names:
        schedule.upsert(name, PLAIN, 3600)
        if what == "resume":
            schedule.pause(name)
    page = visit()
    url = f"/many?do={what}&name=a&name=b&name=c/d"
    hidden = page.form(url)

    def state():
        return [redis.hgetall(f"redbeat:{name}") for name in names]

    before = state()
    assert hidden["name"] == names
    assert page.post("/many", data={**hidden, "count": "2"}).status_code == 422
    assert state() == before
    answer = page.post("/many", data={**hidden, "count": "3"}, follow_redirects=False)
    assert answer.status_code == 303
    match what:
        case "delete":
            assert state() == [{}, {}, {}]
        case "run":
            assert all("manual" in each["pending"] for each in state())
        case _:
            assert [schedule.get(name).policy.paused for name in names] == [what == "pause"] * 3


def test_a_failure_among_several_entries_is_named(visit, schedule):
    schedule.upsert("a", PLAIN, 3600)
    page = visit()

    answer = page.post("/many", data={**page.form("/many?do=pause&name=a"), "name": ["a", "gone"], "count": "2"})

    assert answer.status_code == 409
    assert "1 done, 1 failed" in answer.text
    assert schedule.get("a").policy.paused


ADMIN_ONLY = ("/delete", "/backfill", "/resign", "/edit")
OPERATES = ("/run", "/pause", "/resume")


@pytest.mark.parametrize(
    ("user", "password", "allowed"), [("rita", "r", ()), ("otto", "o", OPERATES), ("ann", "a", OPERATES + ADMIN_ONLY)]
)
def test_a_role_may_do_what_it_names_and_no_more(visit, schedule, e, user, password, allowed):
    page = visit(users=Users(USERS))
    page.auth = (user, password)

    for path in OPERATES + ADMIN_ONLY:
        assert page.get(path, params={"name": "e"}).status_code == (200 if path in allowed else 403), path
        if path not in allowed:
            token = page.form("/")
            assert page.post(path, data={**token, "name": "e"}).status_code == 403, path


@pytest.mark.parametrize("what", ["delete", "resume"])
@pytest.mark.parametrize("is_one", [True, False], ids=["one", "many"])
def test_what_was_stored_after_a_form_was_shown_is_left_alone(visit, schedule, e, what, is_one):
    page, many = visit(), {} if is_one else {"do": what, "count": "1"}
    schedule.pause("e", "mine")
    path = f"/{what}?name=e" if is_one else f"/many?do={what}&name=e"
    form = page.form(path, **many)
    schedule.resume("e")
    schedule.pause("e", "of another operator")

    answer = page.post(path.partition("?")[0], data=form, follow_redirects=False)

    assert answer.status_code == 409
    assert "has changed the entry" in answer.text
    assert schedule.get("e").policy.paused
    assert page.post(path.partition("?")[0], data=page.form(path, **many), follow_redirects=False).status_code == 303


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "renewed"])
def test_a_late_resume_ends_no_newer_pause_of_many(visit, schedule, e, is_ended):
    page = visit()
    schedule.pause_many(note="mine")
    form = page.form("/resume-all")
    if is_ended:
        schedule.resume_many()
    schedule.pause_many(note="of another operator")

    assert page.post("/resume-all", data=form, follow_redirects=False).status_code == 409

    assert [pause.note for pause in schedule.pauses()] == ["of another operator"]
    assert page.post("/resume-all", data=page.form("/resume-all"), follow_redirects=False).status_code == 303
    assert schedule.pauses() == []


def test_operators_may_not_delete_many(visit, schedule, e):
    page = visit(users=Users(USERS))
    page.auth = ("otto", "o")

    assert page.get("/many?do=delete&name=e").status_code == 403
    answer = page.post("/many", data={**page.form("/"), "do": "delete", "name": "e", "count": "1"})
    assert answer.status_code == 403
    assert schedule.get("e")


@pytest.mark.parametrize("path", [*OPERATES, *ADMIN_ONLY])
def test_a_read_only_page_refuses_even_an_admin(visit, schedule, e, path):
    page = visit(read_only=True)
    token = page.form("/")

    assert page.get(path, params={"name": "e"}).status_code == 403
    assert page.post(path, data={**token, "name": "e", "count": "1"}).status_code == 403
    assert page.get("/").text.count("read-only") == 1


def test_changes_beyond_the_limit_are_refused(visit, schedule, e):
    page = visit()
    data = page.form("/pause?name=e", note="")

    answers = {page.post("/pause", data=data, follow_redirects=False).status_code for _ in range(121)}

    assert answers == {303, 429}


def test_an_unreachable_server_is_said_and_nothing_is_lost(visit, own_server):
    from tests.system.apps import make_app

    with make_app(own_server.celery_url, {"singlebeat_socket_timeout": 0.3}) as app:
        page = visit(of=app)
        assert page.get("/").status_code == 200
        own_server.stop()
        answer = wait_until(lambda: answer if (answer := page.get("/")).status_code == 503 else None)

    assert 'class="wrong"' in answer.text


@pytest.fixture
def held(app, redis):
    """Two locks that are held: of a run whose worker lives, and of a run whose worker has died."""
    backend = backend_of(app)
    for key, task in (("SINGLETONLOCK_{a}", "live-one"), ("SINGLETONLOCK_{b}", "dead-one")):
        backend.begin(Ref(key, task, 0, "n"), lease=30, remember_for=60, task="t", arguments="('x',)", entry="e")
    redis.hset("SINGLETONLOCK_{b}", "since", int(redis.hget("SINGLETONLOCK_{b}", "since")) - 25_000)
    redis.pexpire("SINGLETONLOCK_{b}", 5_000)
    return backend


def test_the_lock_of_a_dead_worker_is_freed_and_that_of_a_live_one_stays(visit, held):
    page = visit()

    text = page.get("/locks").text
    assert "live-one" in text
    assert text.count("seems abandoned") == 1
    assert page.submit("/free?id=dead-one").status_code == 303
    answer = page.submit("/free?id=live-one")
    assert answer.status_code == 409
    assert "its worker lives" in answer.text
    assert (held.get("SINGLETONLOCK_{a}"), held.get("SINGLETONLOCK_{b}")) == ("live-one", None)


def test_force_needs_the_id_of_the_task(visit, held):
    page = visit()

    assert page.submit("/free?id=live-one", force="yes", typed="live").status_code == 422
    assert held.get("SINGLETONLOCK_{a}") == "live-one"
    assert page.submit("/free?id=live-one", force="yes", typed="live-one").status_code == 303
    assert held.get("SINGLETONLOCK_{a}") is None


def test_force_needs_an_admin(visit, held):
    page = visit(users=Users(USERS))
    page.auth = ("otto", "o")

    assert page.submit("/free?id=live-one", force="yes", typed="live-one").status_code == 403
    assert held.get("SINGLETONLOCK_{a}") == "live-one"


def test_a_lock_that_is_free_already_is_said(visit, redis):
    assert visit().get("/free?id=gone").status_code == 409


# ------------------------------------------------------------------ names that are not UTF-8

RAW, OTHER = "raw \udcff %2f+*", "raw \ufffd %2f+*"


@pytest.fixture
def twins(app, redis) -> Schedule:
    """Two entries of which a browser shows the same name."""
    for name in (RAW, OTHER):
        Schedule(app).upsert(name, PLAIN, 3600)
    return Schedule(app)


def paused(schedule: Schedule) -> list[str]:
    """Return the names of the paused entries in ASCII, which can be printed."""
    return [ascii(entry.name) for entry in schedule.list() if entry.policy.paused]


def test_a_form_acts_on_the_entry_whose_name_is_not_utf8(visit, twins):
    page = visit()
    links = re.findall(r'href="(/pause\?name=[^"]+%FF[^"]*)"', page.get("/").text)

    assert page.submit(links[0], "/pause").headers["location"] == "/entry?name=raw+%FF+%252f%2B%2A&done=paused"
    assert paused(twins) == [ascii(RAW)]
    assert page.get("/entry?name=raw+%FF+%252f%2B%2A").text.count("paused") > 1
    page.submit(links[0].replace("pause", "delete"), "/delete")
    assert [entry.name for entry in twins.list()] == [OTHER]


def test_boxes_and_forms_of_many_name_an_entry_that_is_not_utf8(visit, twins):
    page = visit()
    (box,) = re.findall(r'type="checkbox" name="(name\*)" value="([^"]+)"', page.get("/").text)
    form = page.get("/many", params={"do": "pause", box[0]: box[1]}).text
    hidden = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))

    assert page.post("/many", data=hidden | {"count": "1"}, follow_redirects=False).status_code == 303
    assert paused(twins) == [ascii(RAW)]


def test_an_entry_whose_name_is_not_utf8_is_edited(visit, twins):
    page = visit()
    path = "/edit?" + urlencode({"name": RAW}, errors="surrogateescape")

    assert save(page, path, jitter="7").status_code == 303
    assert (twins.get(RAW).policy.jitter, twins.get(OTHER).policy.jitter) == (7, None)


def test_a_choice_of_the_zone_leads_back_to_a_name_that_is_not_utf8(visit, twins):
    page = visit()
    query = urlencode({"name": RAW}, errors="surrogateescape")
    (back,) = re.findall(r'name="back" value="([^"]+)"', page.get(f"/entry?{query}").text)

    assert page.submit(f"/entry?{query}", "/zone", zone="utc", back=back).headers["location"] == f"/entry?{query}"


def test_the_api_and_the_history_know_names_that_are_not_utf8(visit, app, redis, twins):
    page, query = visit(), urlencode({"name": RAW}, errors="surrogateescape")
    page.get("/")
    row = {"id": "", "nominal": "2026-01-01T00:00:00+00:00", "decision": "missed"}
    redis.xadd("redbeat::history", {**row, "entry": RAW.encode(errors="surrogateescape")})
    token = {"X-Singlebeat-Token": page.cookies["singlebeat_token"]}

    assert ascii(page.get(f"/api/entry?{query}").json()["name"]) == ascii(RAW)
    assert page.post(f"/api/pause?{query}", headers=token).status_code == 200
    assert paused(twins) == [ascii(RAW)]
    assert page.get("/history.csv").status_code == 200
