"""``doctor``: what may go wrong, or does, in servers, settings, beats, workers and entries."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import click

from .. import __version__
from ..beat.delivery import Delivery, listed, queue_of
from ..beat.entries.statics import Statics, owner_of
from ..beat.keys import Keys
from ..beat.late_places import late_places
from ..beat.lost_messages import MOST, examine
from ..beat.result_backend import ResultBackendError, check_results
from ..beat.schedule import Schedule
from ..beat.server_time import DIFFERS_FROM, UNFIT_FROM, ServerTime
from ..beat.silence import silence
from ..beat.status import QUARANTINED_LATER, REDBEAT_LEADS, ScheduleStatus
from ..beat.store.history import History
from ..beat.store.probe import (
    lock_place,
    lock_refusal,
    lock_server_says,
    refuses_writes,
    schedule_refusal,
    schedule_server_says,
)
from ..beat.store.server import Server
from ..config import Config
from ..connections import RedisError, ResponseError, broker_place, is_redis, masked, schedule_client, schedule_place
from ..errors import LockBackendError, SinglebeatError
from ..locks import backend_of
from ..locks.redis import RedisBackend
from ..run_results import MESSAGE_LOST, RAN_ELSEWHERE
from .history import AGAIN
from .locks import every, old
from .output import command, marked, printable, progress, show_json
from .status import who
from .workers import BrokerError, Workers

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entries.entry import Entry

#: Seconds after which kombu's Redis transport delivers a message again, unless it is told otherwise.
VISIBILITY_TIMEOUT = 3600

#: Seconds for which a queue's workers may be busy with the same runs before that is worth a word.
BUSY_FOR = 5.0

#: Entries without a place in the sorted set that are named.
MOST_NAMED = 10

#: Entries whose own history is read.
MOST_HISTORIES = 10_000

#: Locks that are looked at for one that a worker has renewed, and for those that are old.
MOST_LOCKS, MOST_OLD_LOCKS = 1000, 10_000

#: The oldest server whose commands are enough.
OLDEST_SERVER = (6, 2)


class Finding(NamedTuple):
    """What was found, and what to do."""

    level: str  #: problem, warning or fine
    about: str
    text: str


@command("doctor")
def doctor_(app: Celery, as_json: bool) -> None:
    """Look for what may go wrong; exit code 1 if there is a problem."""
    schedule = _Read(app)
    read = (_rights, _results, _beat, _entries, _workers)
    rights, results, beat, entries, workers = (partial(part, schedule=schedule) for part in read)
    parts = (_server, rights, results, _prefixes, _settings, beat, entries, workers, _locks)
    found = dict[Finding, None]()
    with progress("parts looked at", len(parts), quiet=as_json) as step:
        for look_at in parts:
            found |= dict.fromkeys(_on_any_server(app, look_at, schedule))  # what many parts meet is said once
            step()
    findings = list(found)
    if as_json:
        show_json([finding._asdict() for finding in findings])
    else:
        for level, about, text in findings:
            click.echo(f"{marked(f'{level:<8}', level)} {printable(about)}: {printable(text)}")
    if schedule.away is not None:
        raise schedule.away  # the parts that need it were left out
    raise SystemExit(1 if any(finding.level == "problem" for finding in findings) else 0)


def _on_any_server(app: Celery, look_at: Callable[[Celery], Iterator[Finding]], schedule: _Read) -> Iterator[Finding]:
    """Yield what a part finds, and what a server refuses that this part asks; note that the schedule's is away."""
    try:
        yield from look_at(app)
    except ResponseError as exc:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule_server_says(app, exc))
    except RedisError as exc:
        schedule.away = exc
    except LockBackendError as exc:
        yield _of_locks(app, exc)


def _of_locks(app: Celery, exc: LockBackendError) -> Finding:
    """Return what an error of the locks' server says."""
    refused = lock_refusal(app, exc) if isinstance(exc.__cause__, ResponseError) else ""
    if refused:
        return Finding("problem", f"locks' server {lock_place(app)}", refused)
    return Finding("problem", "locks", lock_server_says(app, exc))


def _server(app: Celery) -> Iterator[Finding]:
    server, about = Server.of(app), f"schedule's server {schedule_place(app)}"
    yield Finding("fine", about, f"it answers, version {server.version}; celery {version('celery')}, redis-py "
                  f"{version('redis')}, celery-redbeat {version('celery-redbeat')}")  # fmt: skip
    numbers = tuple(int(part) for part in server.version.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST_SERVER:
        yield Finding("problem", about, "it is older than Redis 6.2: use a newer one")
    if server.eviction not in {None, "noeviction"}:
        text = f"maxmemory-policy is {server.eviction}: entries may vanish when its memory is full; use noeviction"
        yield Finding("problem", about, text)
    if server.kept == "nothing":
        yield Finding(
            "warning", about, "it keeps nothing on disk (appendonly no, no save): a restart loses the schedule"
        )
    if server.kept == "snapshots":
        text = (
            "it keeps snapshots only (appendonly no): a restart loses what was written since the last one, so entries "
            "may be as they were then, and runs that have ended may run once more; use appendonly yes"
        )
        yield Finding("warning", about, text)


def _rights(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Look whether a server refuses what is needed; whether that of the locks answers is asked with the workers."""
    if schedule.away is None and (refused := schedule_refusal(app)):
        yield Finding("problem", f"schedule's server {schedule_place(app)}", refused)
    if refused := lock_refusal(app):
        yield Finding("problem", f"locks' server {lock_place(app)}", refused)


def _results(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Check the result backend, of which beat and locks are independent."""
    if wrong := schedule.results:
        url = app.conf.result_backend
        about = f"result backend {masked(url)}" if isinstance(url, str) else "result backend"
        text = (
            f"it {wrong}. Beat sends on, but workers wait for it after the body of each task, and hold the slot "
            "meanwhile; then the run ends without a result, and callers that wait for one get none. Start or correct "
            "it (result_backend)"
        )
        yield Finding("problem", about, text)


def _prefixes(app: Celery) -> Iterator[Finding]:
    """Look for locks and entries under one prefix, in one database."""
    config = Config.of(app)
    locks, entries = config.singleton_key_prefix, config.redbeat_key_prefix
    if not locks.startswith(entries) and not entries.startswith(locks):
        return
    with suppress(SinglebeatError):
        backend = backend_of(app)
        if isinstance(backend, RedisBackend) and backend.holds(Keys.of(app).schedule):
            text = (
                f"{locks!r} and redbeat_key_prefix ({entries!r}) overlap, and locks and entries share a database: a "
                "tool that deletes keys by prefix, such as clear_locks of celery-singleton, deletes entries too. "
                "Choose a prefix for locks that does not begin like the other one"
            )
            yield Finding("problem", "singleton_key_prefix", text)


def _settings(app: Celery) -> Iterator[Finding]:
    config = Config.of(app)
    if config.redbeat_lock_key is None:
        yield Finding("warning", "redbeat_lock_key", "is None: no beat leads, all share the work, none is fenced")
    if config.redbeat_lock_timeout < 2:
        text = f"{config.redbeat_lock_timeout:g} s is short: a pause of the host or of Redis costs leadership"
        yield Finding("warning", "redbeat_lock_timeout", text)
    if config.singlebeat_lock_lease < 3 * config.singlebeat_socket_timeout:
        text = (
            f"{config.singlebeat_lock_lease:g} s leave no time to renew again when one call takes "
            f"singlebeat_socket_timeout ({config.singlebeat_socket_timeout:g} s): make it three times as long"
        )
        yield Finding("warning", "singlebeat_lock_lease", text)
    if is_redis(app.conf.broker_url):
        yield from _visibility(app)
    for name, url in _urls(app):
        if (
            "@" in url
            and url.startswith("redis://")
            and urlsplit(url).hostname not in {"localhost", "127.0.0.1", "::1"}
        ):
            text = f"{masked(url)} sends its password in the clear: use rediss://, and keep it out of the code"
            yield Finding("warning", name, text)


def _urls(app: Celery) -> Iterator[tuple[str, str]]:
    for name in ("broker_url", "result_backend", "redbeat_redis_url", "singleton_backend_url"):
        url = app.conf.get(name)
        if isinstance(url, str):
            yield name, url


def _visibility(app: Celery) -> Iterator[Finding]:
    given: object = (app.conf.broker_transport_options or {}).get("visibility_timeout", VISIBILITY_TIMEOUT)
    for task in app.tasks.values():
        limit = task.time_limit or app.conf.task_time_limit
        if task.acks_late and not task.name.startswith("celery.") and limit and limit > given:
            text = (
                f"its time limit of {limit} s is longer than the broker's visibility_timeout of {given} s: "
                "its message is delivered again while it runs (singlebeat refuses the copy); raise the timeout"
            )
            yield Finding("warning", f"task {task.name}", text)


def _beat(app: Celery, schedule: _Read) -> Iterator[Finding]:
    state = schedule.state
    for text, ahead in state.wrong_clocks(standbys=True):
        advice = f"{text}: set up NTP on both. Countdown, eta and expires of messages go by the clocks of their hosts"
        yield Finding("problem" if abs(ahead) > UNFIT_FROM else "warning", "clock", advice)
    if state.waits:
        advice = f"{state.waits}. To run one now: celery singlebeat trigger NAME. Set up NTP on that server"
        yield Finding("problem" if state.set_back > UNFIT_FROM else "warning", "clock", advice)
    yield from _leadership(app, state)
    yield from _apps(app, state)
    if state.leader.get("lost"):
        text = (
            f"when the present term began, at {state.leader.get('since')}, the server had lost the schedule, or its "
            f"last changes: it did not know term {state.leader['lost']} any more. Entries of beat_schedule are back, "
            "without the pauses that were set: import the others from an export, and let the server write to disk "
            "(appendonly yes), or let its replicas have what was written before they take over (min-replicas-to-write)"
        )
        yield Finding("warning", "schedule", text)
    if not state.redbeat_leads and (pending := _stays_pending(app)):  # RedBeat sends none of them
        why = "the broker or the locks' server may be unreachable"
        if schedule_refusal(app):
            why = "the schedule's server refuses what beat needs to send them, or to note that they were sent"
        text = f"{pending} occurrences are claimed and not confirmed: {why}"
        yield Finding("warning", "beat", text)
    for name, record in state.quarantine.items():
        text = f"is quarantined since {record['since']} and does not run: {record['reason']}"
        yield Finding("problem", f"entry {name}", text)


class _Read:
    """What several parts ask for about the schedule and the result backend, read once.

    Raises:
        RedisError: the schedule's server did not answer before, and is not waited for again.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.away: RedisError | None = None  #: the error of the schedule's server, if it did not answer

    @cached_property
    def state(self) -> ScheduleStatus:
        if self.away is not None:
            raise self.away
        return ScheduleStatus.of(self.app)

    @cached_property
    def results(self) -> str:
        """What is wrong with the result backend; empty if it answers, or if the app has none."""
        try:
            check_results(self.app, timeout=Config.of(self.app).singlebeat_socket_timeout)
        except ResultBackendError as exc:
            return str(exc)
        return ""

    @property
    def usable(self) -> Sequence[Entry]:
        """The entries that can be read."""
        return self._examined[0]

    @property
    def unusable(self) -> Mapping[str, str]:
        """Why beat cannot use some entries that it has not quarantined yet, by name."""
        return {name: why for name, why in self._examined[1].items() if name not in self.state.quarantine}

    @cached_property
    def _examined(self) -> tuple[Sequence[Entry], Mapping[str, str]]:
        return Schedule(self.app).examine(datetime.fromtimestamp(self.state.now, UTC))


def _entries(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Look for fields that mean nothing, entries that are late or never due, and runs that fail or are skipped."""
    for entry in schedule.usable:
        if entry.ignored:
            yield Finding("warning", f"entry {entry.name}", entry.ignored)
    for name, why in islice(schedule.unusable.items(), MOST_NAMED):
        yield Finding("problem", f"entry {name}", f"is unusable: {why}; {QUARANTINED_LATER}")
    if len(schedule.unusable) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} are unusable (celery singlebeat list)")
    yield from _silent(app, schedule.usable)
    if not schedule.state.redbeat_leads:  # it has times of its own
        yield from _late(app, schedule.usable)
    entries = Schedule(app)
    names = [*islice(entries.without_place(), MOST_NAMED + 1)]
    for name in names[:MOST_NAMED]:
        yield Finding("warning", f"entry {name}", f"{entries.no_place(name)}; or delete it")
    if len(names) > MOST_NAMED:
        yield Finding("warning", "entries", f"more than these {MOST_NAMED} have no place in {Keys.of(app).schedule}")


def _late(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Look for places in the schedule that are later than the times of their entries."""
    wrong = ((name, place) for name, place in late_places(app, entries) if place.is_wrong)
    for name, place in islice(wrong, MOST_NAMED):
        yield Finding("problem", f"entry {name}", str(place))
    if next(wrong, None):
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} have places that are later than their times")


def _leadership(app: Celery, state: ScheduleStatus) -> Iterator[Finding]:
    """Look who leads, and whether that beat sends entries in time."""
    refused = schedule_refusal(app)
    if state.works and refuses_writes(refused):
        led = "beats share the work" if state.is_shared else f"{who(state)}, leads"
        text = f"{led} at this moment, and can send nothing while the schedule's server refuses to write"
        yield Finding("problem", "beat", text)
    elif not state.works and refused:
        yield Finding("problem", "beat", f"{state.problem()}. The schedule's server may be why: {refused}")
    elif not state.works and state.is_unused and not app.conf.beat_schedule:
        yield Finding("fine", "beat", "none was ever there, and no entry in the schedule needs one")
    elif not state.works:
        yield Finding("problem", "beat", f"{state.problem()}: nothing is sent until one is started")
    elif state.is_shared:
        named = ", ".join("{host} (pid {pid}, since {since})".format_map(beat) for beat in state.standbys)
        text = f"{len(state.standbys)} share the work{named and ': '}{named}. One that dies is missing here"
        text += " after 20 s, and no tool knows how many you have started: probe the /healthz of each"
        yield Finding("fine" if len(state.standbys) > 1 else "warning", "beat", text)
    elif not state.standbys:
        text = "none stands by: when the one that leads is lost, nothing is sent until it is back; start a second one"
        yield Finding("warning", "beat", text)
    if state.redbeat_silent:
        yield Finding("problem", "beat", state.redbeat_silent)
    elif state.redbeat_leads:
        yield Finding("warning", "beat", REDBEAT_LEADS)
    elif state.overdue:
        text = f"{state.overdue} entries are overdue, the first by {state.lag:.0f} s"
        yield Finding("problem", "beat", text)


def _silent(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Look for entries whose last runs all failed, or were skipped, in the history that each keeps itself."""
    by_name = {entry.name: entry for entry in entries[:MOST_HISTORIES]}
    found = ((name, text) for name, own in History(app).own(by_name) if (text := silence(by_name[name], own)))
    for name, text in islice(found, MOST_NAMED):
        yield Finding("warning", f"entry {name}", f"{text} (celery singlebeat explain {shlex.quote(name)})")
    if more := sum(1 for _ in found):
        yield Finding("warning", "entries", f"the last runs of {more} more entries all failed, or were skipped")
    if len(entries) > MOST_HISTORIES:
        text = f"whether all their runs fail was looked up for the first {MOST_HISTORIES} of {len(entries)} only"
        yield Finding("fine", "entries", text)


def _apps(app: Celery, state: ScheduleStatus) -> Iterator[Finding]:
    """Look for another app under the same prefix, and for two apps of one name."""
    about, check = f"redbeat_key_prefix {Config.of(app).redbeat_key_prefix}", Config.of(app).singlebeat_other_app_check
    statics = Statics(app, schedule_client(app))
    advice = "give each app a prefix of its own"
    if check != "ignore":
        for other, count in statics.of_others().items():
            text = f"{count} entries there are of app {other}, not of {statics.owner}: the beat that leads sends all"
            yield Finding("problem", about, f"{text} of them to the queues of its own app; {advice}")
        for beat, role in ((state.leader, "leads"), *((standby, state.role) for standby in state.standbys)):
            if beat.get("app", statics.owner) not in {statics.owner, ""}:
                text = f"the beat {beat['host']}, pid {beat['pid']}, which {role}, is of app {beat['app']}"
                yield Finding("problem", about, f"{text}, not of {statics.owner}; {advice}")
    ours = [beat["statics"] for beat in (state.leader, *state.standbys) if beat.get("app") == statics.owner]
    if len({*ours}) > 1:
        numbers = " and ".join(each.partition(" ")[0] for each in sorted({*ours}))
        text = (
            f"beats of app {statics.owner} differ in their beat_schedule ({numbers} entries): whichever leads removes "
            "the entries that it lacks. That is right during a deploy. Else they are two apps of one name, or hosts "
            f'with different code: {advice}, or a name (Celery("shop"))'
        )
        yield Finding("warning", about, text)


def _stays_pending(app: Celery) -> int:
    """Return how many occurrences are claimed and not sent; in every tick there are some for a moment."""
    client, key = schedule_client(app), Keys.of(app).pending
    before = set(client.zrange(key, 0, -1))
    if before:
        time.sleep(AGAIN)
    return len(before.intersection(client.zrange(key, 0, -1))) if before else 0


def _workers(app: Celery, schedule: _Read) -> Iterator[Finding]:
    seen = False
    try:
        seen = backend_of(app).workers_seen()
        if not seen:
            text = "none with singlebeat was seen: plain tasks are sent without a lock; install it in the workers, too"
            yield Finding("warning", "workers", text)
    except LockBackendError as exc:
        yield _of_locks(app, exc)
    except SinglebeatError as exc:
        yield Finding("problem", "locks", str(exc))
    try:
        workers = Workers.ask(app)
    except BrokerError as exc:
        yield Finding("problem", f"broker {broker_place(app)}", f"it {str(exc).rstrip('.')}; messages cannot be sent")
        return
    if not workers.known_tasks:
        yield _none_answers(app)
        return
    known = frozenset().union(*workers.known_tasks.values())
    yield Finding("fine", "workers", f"{len(workers.known_tasks)} answer")
    yield from _versions(workers.versions, seen=seen, queued_ttl=Config.of(app).singlebeat_queued_ttl)
    if schedule.away is not None:
        return
    yield from _clocks(app, workers)
    if schedule.state.is_led_by(owner_of(app)):
        yield from _queues(app, schedule, workers)
    for entry in schedule.usable:
        if entry.task not in known:
            text = f"no worker that answers knows its task {entry.task}: a worker that gets the message drops it"
            yield Finding("problem", f"entry {entry.name}", text)


def _queues(app: Celery, schedule: _Read, workers: Workers) -> Iterator[Finding]:
    """Look for queues of entries that no worker reads, whose readers lack a task, or have no free slot."""
    by_queue: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in schedule.usable:
        if entry.enabled and (queue := queue_of(app, entry)):
            by_queue[queue].append(entry)
    now = datetime.now(UTC)
    for queue, senders in by_queue.items():
        delivery = Delivery.of(queue, workers.readers)
        if delivery.unread:
            text = (
                f"{delivery.unread}: the runs of {listed(sorted(entry.name for entry in senders))} wait there. Start a "
                f"worker with -Q {queue}, or correct the queue of the entries, or task_routes"
            )
            yield Finding("problem", f"queue {queue}", text)
        for entry in senders:
            if wrong := delivery.without(entry.task):
                yield Finding("problem", f"entry {entry.name}", f"{wrong}. Let one worker have both")
        if (since := delivery.full_since) is not None and (now - since).total_seconds() > BUSY_FOR:
            advice = "Start more workers, or make these tasks shorter"
            if schedule.results:
                advice = f"The result backend may be why, because it {schedule.results}: correct that first"
            text = f"{delivery.full}: other messages wait. {advice}"
            yield Finding("warning", f"queue {queue}", text)


def _none_answers(app: Celery) -> Finding:
    """Say what is known about the workers if none answers: one that ends its last tasks answers no longer."""
    lease = Config.of(app).singlebeat_lock_lease
    with suppress(SinglebeatError):
        locks = (lock for lock in islice(every(app), MOST_LOCKS) if lock.state == "running")
        renewed = [lock for lock in locks if lock.renewed is not None and not lock.seems_abandoned]
        if lock := min(renewed, key=lambda lock: lock.renewed or 0.0, default=None):
            since = f"{max(1.0, min(lock.renewed or 0.0, lease)):.0f} s"
            text = (
                f"none answers, but {lock.worker or 'one'} renewed the lock of task {lock.task_id} {since} ago: it "
                f"shuts down and ends its last tasks, is too busy, or has died within the last {since}. Without "
                "another worker, messages wait in their queues"
            )
            return Finding("warning", "workers", text)
    return Finding("problem", "workers", "none answers: messages wait in their queues")


def _locks(app: Celery) -> Iterator[Finding]:
    """Look for locks whose messages are lost, or were run by workers that free no lock."""
    try:
        found = examine(app, list(islice(old(app, most=MOST_OLD_LOCKS), MOST)))
    except SinglebeatError:  # which was said before
        return
    for outcome, what in _STALE.items():
        stale = [each for each in found if each.outcome == outcome]
        if stale:
            text = (
                f"{len(stale)} {what}, such as task {stale[0].lock.ref.task_id} ({stale[0].lock.task}): "
                f"{stale[0].reason}. Equal runs and calls are refused meanwhile. To free them: "
                "celery singlebeat unlock --stale"
            )
            yield Finding("problem", "locks", text)


#: What was found out about the message of a lock.
_STALE = {
    MESSAGE_LOST: "locks wait for messages that are lost",
    RAN_ELSEWHERE: "locks are held by tasks that have run on workers without singlebeat",
}


def _clocks(app: Celery, workers: Workers) -> Iterator[Finding]:
    """Look for workers whose clock differs from that of the schedule's server, by which beat decides."""
    server_time = ServerTime(quiet=True)
    server_time.ask(schedule_client(app), Keys.of(app).schedule)
    ahead_of_us = server_time.timestamp() - time.monotonic()
    for worker, ahead in workers.wrong_clocks(ahead_of_us, more_than=DIFFERS_FROM):
        text = (
            f"the clock of worker {worker} is about {ahead:+.0f} s off that of the schedule's server: set up NTP on "
            "both. Countdown, eta and expires of messages go by the clocks of their hosts"
        )
        yield Finding("problem" if abs(ahead) > UNFIT_FROM else "warning", "clock", text)


def _versions(versions: Mapping[str, str], *, seen: bool, queued_ttl: float) -> Iterator[Finding]:
    """Compare the singlebeat of the workers with one another's and with ours.

    Args:
        seen: some worker has singlebeat, so beat takes locks for plain tasks.
    """
    without = sorted(worker for worker, found in versions.items() if not found)
    if without and seen:
        text = (
            f"{', '.join(without)}: no singlebeat there, or its settings name no server for locks. When such a worker "
            "runs a plain task that beat has sent, it leaves the lock of that task as it is, and the next runs are "
            "skipped until beat finds that out: most of a minute, and where messages wait in the queue up to "
            f"{queued_ttl:g} s (singlebeat_queued_ttl). How the run ended is not recorded either. Install "
            "celery-singlebeat there, too, and start the worker again"
        )
        yield Finding("problem", "workers without singlebeat", text)
    found = {*versions.values(), __version__} - {""}
    if len(found) > 1:
        which = {f"{version} on {worker}" for worker, version in versions.items() if version}
        text = (
            f"{', '.join(sorted(which))}, {__version__} here: install the same everywhere, because an older one may "
            "not understand what a newer one leaves in messages and Redis"
        )
        yield Finding("warning", "versions of singlebeat differ", text)
