"""The command ``doctor``: checks servers, settings, beats, workers, entries and locks."""

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
from ..beat.entries.statics import Statics, owner_of, signature_of
from ..beat.keys import Keys
from ..beat.late_places import late_places
from ..beat.lost_messages import MOST, examine
from ..beat.one_write import why_several_writes
from ..beat.result_backend import ResultBackendError, check_results, result_place
from ..beat.schedule import Schedule
from ..beat.server_time import DIFFERS_FROM, UNFIT_FROM, ServerTime
from ..beat.silence import silence
from ..beat.status import MAX_LAG, PLAIN_BEAT, QUARANTINED_LATER, REDBEAT_LEADS, ScheduleStatus, counted
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
from ..broker import bounded
from ..config import Config
from ..connections import (
    RedisError,
    ResponseError,
    broker_place,
    is_redis,
    masked,
    schedule_client,
    schedule_place,
    what_it_does,
)
from ..errors import LockBackendError, SinglebeatError
from ..locks import backend_of
from ..locks.redis import RedisBackend
from ..locks.send import why_two_writes
from ..run_results import MESSAGE_LOST, RAN_ELSEWHERE
from .history import AGAIN
from .locks import every, locks_of, old
from .output import command, marked, printable, progress, show_json
from .status import who
from .workers import BrokerError, Workers

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entries.entry import Entry
    from ..beat.explain import HeldLock

#: Seconds after which kombu's Redis transport delivers an unacknowledged message again by default.
VISIBILITY_TIMEOUT = 3600

#: Seconds for which a queue's workers may be busy with the same runs before that is a warning.
BUSY_FOR = 5.0

#: Maximum number of entries that the findings of one check name.
MOST_NAMED = 10

#: Maximum number of entries whose own history is read.
MOST_HISTORIES = 10_000

#: Maximum number of locks that are read to find a renewed lock, and to find old locks.
MOST_LOCKS, MOST_OLD_LOCKS = 1000, 10_000

#: The oldest server version that has all commands that singlebeat needs.
OLDEST_SERVER = (6, 2)


class Finding(NamedTuple):
    """One result of a check, with the remedy."""

    level: str  #: problem, warning or fine
    about: str
    text: str


@command("doctor")
def doctor_(app: Celery, as_json: bool) -> None:
    """Check servers, settings, beats, workers, entries and locks; exit code 1 if there is a problem."""
    schedule = _Read(app)
    read = (_rights, _results, _beat, _entries, _workers)
    rights, results, beat, entries, workers = (partial(part, schedule=schedule) for part in read)
    parts = (_server, rights, results, _prefixes, _settings, beat, entries, workers, _locks, _writes)
    found = dict[Finding, None]()
    with progress("parts checked", len(parts), quiet=as_json) as step:
        for check in parts:
            found |= dict.fromkeys(_on_any_server(app, check, schedule))  # a finding of many parts is shown once
            step()
    findings = list(found)
    if schedule.error is not None and as_json:
        text = f"it {what_it_does(schedule.error)}: {schedule.error}; the parts that need it were left out"
        findings.insert(0, Finding("problem", f"schedule's server {schedule_place(app)}", text))
    if as_json:
        show_json([finding._asdict() for finding in findings])
    else:
        for level, about, text in findings:
            click.echo(f"{marked(f'{level:<8}', level)} {printable(about)}: {printable(text)}")
    if schedule.error is not None:
        raise schedule.error  # the parts that need the schedule's server were left out
    raise SystemExit(1 if any(finding.level == "problem" for finding in findings) else 0)


def _on_any_server(app: Celery, check: Callable[[Celery], Iterator[Finding]], schedule: _Read) -> Iterator[Finding]:
    """Yield the findings of a check, also if a server refuses; note an error of the schedule's server."""
    try:
        yield from check(app)
    except ResponseError as exc:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule_server_says(app, exc))
    except RedisError as exc:
        schedule.error = exc
    except LockBackendError as exc:
        yield _of_locks(app, exc)


def _of_locks(app: Celery, exc: LockBackendError) -> Finding:
    """Return the finding for an error of the locks' server."""
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
            "it keeps snapshots only (appendonly no): a restart loses the writes since the last snapshot, so "
            "entries may be as they were then, and runs that have ended may run once more; use appendonly yes"
        )
        yield Finding("warning", about, text)


def _rights(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Check that no server refuses a command; ``_workers`` checks that the locks' server answers."""
    if schedule.error is None and schedule.refused:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule.refused)
    if refused := lock_refusal(app):
        yield Finding("problem", f"locks' server {lock_place(app)}", refused)


def _results(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Check the result backend, which beat and locks do not use."""
    if wrong := schedule.results:
        text = (
            f"it {wrong}. Beat still sends, but workers wait for the backend after the body of each task, and hold the "
            "slot meanwhile. Then the run ends without a result, and callers that wait for one get none. Start the "
            "backend, or correct result_backend"
        )
        yield Finding("problem", result_place(app), text)


def _prefixes(app: Celery) -> Iterator[Finding]:
    """Check for locks and entries under one prefix, in one database."""
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
        yield Finding("warning", "redbeat_lock_key", "is None: no beat leads, all beats share the work unfenced")
    if config.redbeat_lock_timeout < 2:
        text = f"{config.redbeat_lock_timeout:g} s is short: a pause of the host or of Redis costs leadership"
        yield Finding("warning", "redbeat_lock_timeout", text)
    if config.singlebeat_lock_lease < 3 * config.singlebeat_socket_timeout:
        text = (
            f"{config.singlebeat_lock_lease:g} s leave no time for a second renewal when one call takes "
            f"singlebeat_socket_timeout ({config.singlebeat_socket_timeout:g} s): use at least three times that timeout"
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
            text = f"{masked(url)} sends its password in the clear: use rediss://, and keep that password out of code"
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
    yield from _leadership(app, schedule)
    yield from _apps(app, state)
    if state.lost:
        text = (
            f"{state.lost}. Let the server write to disk (appendonly yes), or refuse writes while its replicas lag "
            "behind (min-replicas-to-write)"
        )
        yield Finding("warning", "schedule", text)
    if not state.redbeat_leads and (pending := _count_pending(app)):  # RedBeat sends none of them
        why = "the broker or the locks' server may be unreachable"
        if schedule.refused:
            why = "the schedule's server refuses a command that beat needs to send or to confirm them"
        text = f"{counted(pending, 'occurrence is', 'occurrences are')} claimed and not confirmed: {why}"
        if state.pending_lag:
            text += f". The first is late by {state.pending_lag:.0f} s"
        yield Finding("problem" if state.pending_lag > MAX_LAG else "warning", "beat", text)
    for name, record in state.quarantine.items():
        text = f"is quarantined since {record['since']} and does not run: {record['reason']}"
        yield Finding("problem", f"entry {name}", text)


class _Read:
    """The state of the schedule and of the result backend, read once for all parts that need it.

    Raises:
        RedisError: the schedule's server did not answer an earlier part; no part waits for it again.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.error: RedisError | None = None  #: the error of the schedule's server, if it did not answer

    @cached_property
    def state(self) -> ScheduleStatus:
        if self.error is not None:
            raise self.error
        return ScheduleStatus.of(self.app)

    @cached_property
    def refused(self) -> str:
        """What the schedule's server refuses, and what to do; empty if it refuses nothing that is needed."""
        return schedule_refusal(self.app)

    @cached_property
    def results(self) -> str:
        """The error of the result backend; empty if the backend answers, or if the app has none."""
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
        """The reasons why beat cannot use entries that it has not quarantined yet, by name."""
        return {name: why for name, why in self._examined[1].items() if name not in self.state.quarantine}

    @cached_property
    def _examined(self) -> tuple[Sequence[Entry], Mapping[str, str]]:
        return Schedule(self.app).examine(datetime.fromtimestamp(self.state.now, UTC))


def _entries(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Check for unknown fields, entries that are unusable, late or never due, and runs that fail or are skipped."""
    for entry in schedule.usable:
        if entry.ignored:
            yield Finding("warning", f"entry {entry.name}", entry.ignored)
    for name, why in islice(schedule.unusable.items(), MOST_NAMED):
        yield Finding("problem", f"entry {name}", f"is unusable: {why}; {QUARANTINED_LATER}")
    if len(schedule.unusable) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} are unusable (celery singlebeat list)")
    yield from _silent(app, schedule.usable)
    if not schedule.state.redbeat_leads:  # RedBeat calculates other times
        yield from _late(app, schedule.usable)
    entries = Schedule(app)
    names = [*islice(entries.without_place(), MOST_NAMED + 1)]
    for name in names[:MOST_NAMED]:
        yield Finding("warning", f"entry {name}", f"{entries.no_place(name)}; or delete it")
    if len(names) > MOST_NAMED:
        yield Finding("warning", "entries", f"more than these {MOST_NAMED} have no place in {Keys.of(app).schedule}")


def _late(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Check for entries whose place in the schedule is later than their next time."""
    found = [(name, place) for name, place in late_places(app, entries) if place.level != "fine"]
    found.sort(key=lambda each: each[1].level)  # problems before warnings
    for name, place in found[:MOST_NAMED]:
        yield Finding(place.level, f"entry {name}", str(place))
    if found[MOST_NAMED:]:
        text = f"more than these {MOST_NAMED} have places that are later than their times"
        yield Finding(found[MOST_NAMED][1].level, "entries", text)


def _leadership(app: Celery, schedule: _Read) -> Iterator[Finding]:
    """Check that a beat leads, that it sends entries in time, and that a standby is there."""
    state, refused = schedule.state, schedule.refused
    if state.works and refuses_writes(refused):
        led = "beats share the work" if state.is_shared else f"{who(state)}, leads"
        text = f"{led} at this moment, and cannot send while the schedule's server refuses writes"
        yield Finding("problem", "beat", text)
    elif not state.works and refused:
        yield Finding("problem", "beat", f"{state.problem()}. The schedule's server may be why: {refused}")
    elif not state.works and state.is_unused and not app.conf.beat_schedule:
        yield Finding("fine", "beat", "no beat was ever started, and no entry needs one")
    elif not state.works:
        text = f"{state.problem()}: singlebeat sends nothing until one is started. {PLAIN_BEAT}"
        yield Finding("problem", "beat", text)
    elif state.is_shared:
        named = ", ".join("{host} (pid {pid}, since {since})".format_map(beat) for beat in state.standbys)
        text = f"{len(state.standbys)} beats share the work{named and ': '}{named}. A beat that dies is missing here"
        text += " after 20 s, and doctor does not know how many beats you have started: probe the /healthz of each beat"
        yield Finding("fine" if len(state.standbys) > 1 else "warning", "beat", text)
    elif not state.standbys:
        text = "there is no standby: when the leader is lost, nothing is sent until it is back; start a second beat"
        yield Finding("warning", "beat", text)
    if state.redbeat_silent:
        yield Finding("problem", "beat", state.redbeat_silent)
    elif state.redbeat_leads:
        yield Finding("warning", "beat", REDBEAT_LEADS)
    elif state.overdue:
        yield Finding("problem", "beat", state.overdue_entries)


def _silent(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Check the own history of each entry for last runs that all failed, or were all skipped."""
    by_name = {entry.name: entry for entry in entries[:MOST_HISTORIES]}
    found = ((name, text) for name, own in History(app).own(by_name) if (text := silence(by_name[name], own)))
    for name, text in islice(found, MOST_NAMED):
        yield Finding("warning", f"entry {name}", f"{text} (celery singlebeat explain {shlex.quote(name)})")
    if more := sum(1 for _ in found):
        yield Finding("warning", "entries", f"the last runs of {more} more entries all failed, or were skipped")
    if len(entries) > MOST_HISTORIES:
        text = f"whether all their runs fail was checked for the first {MOST_HISTORIES} of {len(entries)} only"
        yield Finding("fine", "entries", text)


def _apps(app: Celery, state: ScheduleStatus) -> Iterator[Finding]:
    """Check for another app under the same prefix, and for two apps of the same name."""
    about, check = f"redbeat_key_prefix {Config.of(app).redbeat_key_prefix}", Config.of(app).singlebeat_other_app_check
    statics = Statics(app, schedule_client(app))
    advice = "give each app a prefix of its own"
    if check != "ignore":
        for other, count in statics.of_others().items():
            number = counted(count, "entry there is", "entries there are")
            text = f"{number} of app {other}, not of {statics.owner}: the leader sends all"
            yield Finding("problem", about, f"{text} of them to the queues of its own app; {advice}")
        for beat, role in ((state.leader, "leads"), *((standby, state.role) for standby in state.standbys)):
            if beat.get("app", statics.owner) not in {statics.owner, ""}:
                text = f"the beat {beat['host']}, pid {beat['pid']}, which {role}, is of app {beat['app']}"
                yield Finding("problem", about, f"{text}, not of {statics.owner}; {advice}")
    beats = (state.leader, *state.standbys)
    theirs = sorted({beat["statics"] for beat in beats if beat.get("app") == statics.owner and beat.get("statics")})
    here = _statics_here(app) if theirs else ""
    differ = ""
    if len(theirs) > 1:
        numbers = " and ".join(each.partition(" ")[0] for each in theirs)
        differ = f"beats of app {statics.owner} differ in their beat_schedule ({numbers} entries)"
    elif here and here not in theirs:
        numbers = f"{here.partition(' ')[0]} entries here, {theirs[0].partition(' ')[0]} there"
        differ = f"the beat_schedule of this process differs from that of the beats of app {statics.owner} ({numbers})"
    if differ:
        text = (
            f"{differ}: each beat that begins to lead stores its own, and removes the entries that its own lacks. That "
            "is right during a deploy. Else two apps have one name, or hosts run different code: "
            f'{advice}, or a name (Celery("shop")). An rrule without dtstart differs in each process'
        )
        yield Finding("warning", about, text)


def _statics_here(app: Celery) -> str:
    """Return the number and the digest of the entries in the code of this process; empty if it has none."""
    try:
        app.loader.import_default_modules()  # as beat does: a module of tasks may add entries
        app.finalize()
    except Exception:  # of a user's module
        return ""
    return signature_of(app)["statics"] if app.conf.beat_schedule else ""


def _count_pending(app: Celery) -> int:
    """Return how many occurrences stay claimed and unconfirmed; each tick has such occurrences for a moment."""
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
            text = "no worker with singlebeat was seen: plain tasks are sent without a lock; install it there, too"
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
    if schedule.error is not None:
        return
    yield from _clocks(app, workers)
    if schedule.state.is_led_by(owner_of(app)):
        yield from _queues(app, schedule, workers)
    for entry in schedule.usable:
        if entry.task not in known:
            text = f"no worker that answers knows its task {entry.task}: a worker that gets the message drops it"
            yield Finding("problem", f"entry {entry.name}", text)


def _queues(app: Celery, schedule: _Read, workers: Workers) -> Iterator[Finding]:
    """Check for queues of entries that no worker reads, or whose workers lack a task or have no free slot."""
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
                text = f"{wrong}. Let one worker read the queue and know the task"
                yield Finding("problem", f"entry {entry.name}", text)
        if (since := delivery.full_since) is not None and (now - since).total_seconds() > BUSY_FOR:
            advice = "Start more workers, or make these tasks shorter"
            if schedule.results:
                advice = f"The result backend may be the cause, because it {schedule.results}: fix that first"
            text = f"{delivery.full}: other messages wait. {advice}"
            yield Finding("warning", f"queue {queue}", text)


def _none_answers(app: Celery) -> Finding:
    """Return the finding if no worker answers: a worker that ends its last tasks does not answer any more."""
    lease = Config.of(app).singlebeat_lock_lease
    with suppress(SinglebeatError):
        locks = (lock for lock in islice(every(app), MOST_LOCKS) if lock.state == "running")
        renewed = [lock for lock in locks if lock.renewed is not None and not lock.seems_abandoned]
        if lock := min(renewed, key=lambda lock: lock.renewed or 0.0, default=None):
            since = f"{max(1.0, min(lock.renewed or 0.0, lease)):.0f} s"
            text = (
                f"no worker answers, but {lock.worker or 'one'} renewed the lock of task {lock.task_id} {since} ago: "
                f"it shuts down and ends its last tasks, is too busy, or has died within the last {since}. Without "
                "another worker, messages wait in their queues"
            )
            return Finding("warning", "workers", text)
    return Finding("problem", "workers", "no worker answers: messages wait in their queues")


def _locks(app: Celery) -> Iterator[Finding]:
    """Check for locks that no worker frees: their messages are lost or ran elsewhere, or their workers are silent."""
    try:
        rows = list(islice(locks_of(app), MOST_OLD_LOCKS))
        found = examine(app, list(islice(old(app, rows), MOST)))
    except SinglebeatError:  # an earlier part has reported it
        return
    for outcome, what in _STALE.items():
        stale = [each for each in found if each.outcome == outcome]
        if stale:
            lock, how_many = stale[0].lock, what[len(stale) > 1].format(len(stale))
            text = (
                f"{how_many}, such as task {lock.ref.task_id} ({lock.task}): {stale[0].reason}. Equal runs and calls "
                "are refused meanwhile. To free them: celery singlebeat unlock --stale"
            )
            yield Finding("problem", "locks", text)
    yield from _silent_owners(app, [lock for _, _, lock in rows if lock.seems_abandoned])


def _silent_owners(app: Celery, locks: Sequence[HeldLock]) -> Iterator[Finding]:
    """Check for runs whose workers have not renewed their locks and do not answer."""
    try:
        running = Workers.ask(app).running if locks else {}
    except BrokerError:  # an earlier part has reported it
        return
    for lock in islice((lock for lock in locks if lock.task_id not in running), MOST_NAMED):
        ends = f" in {lock.left:.0f} s" if lock.left is not None else ""
        text = (
            f"the lock of task {lock.task_id} was last renewed {lock.last_renewed}, and no worker that answers runs "
            f"the task: its worker has probably died, or hangs. The lock ends by itself{ends}"
        )
        yield Finding("warning", "locks", text)


#: The words for one lock and for several, for each outcome of the check of a lock's message.
_STALE = {
    MESSAGE_LOST: ("1 lock waits for a message that is lost", "{} locks wait for messages that are lost"),
    RAN_ELSEWHERE: (
        "1 lock is held by a task that has run on a worker without singlebeat",
        "{} locks are held by tasks that have run on workers without singlebeat",
    ),
}


def _writes(app: Celery) -> Iterator[Finding]:
    """Tell in how many writes calls take their locks and are sent, and due entries as well."""
    with suppress(Exception), bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout) as broker:
        # An error of a server is named by the other parts.
        why = why_two_writes(app, broker)
        text = "they take their locks and are sent in one write: a sender that is killed leaves both or neither"
        several = f"they take their locks and are sent in two writes: {why}"
        yield Finding("fine", "calls of Singletons", several if why else text)
        why = why_several_writes(app, broker)
        text = "they are claimed, locked, sent and recorded in one write: their messages are sent exactly once"
        several = f"they are claimed, locked, sent and recorded in several writes, so sent at least once: {why}"
        yield Finding("fine", "due entries", several if why else text)


def _clocks(app: Celery, workers: Workers) -> Iterator[Finding]:
    """Check for workers whose clock differs from the clock of the schedule's server, which beat uses."""
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
    """Compare the versions of singlebeat in the workers and in this process.

    Args:
        seen: whether a worker with singlebeat was seen: then beat acquires locks for plain tasks.
    """
    without = sorted(worker for worker, found in versions.items() if not found)
    if without and seen:
        text = (
            f"{', '.join(without)}: no singlebeat there, or its settings name no server for locks. When such a worker "
            "runs a plain task that beat has sent, it leaves the lock of that task as it is, and the next runs are "
            "skipped until beat finds that out: most of a minute, or while messages wait in the queue up to "
            f"{queued_ttl:g} s (singlebeat_queued_ttl). How the run ended is not recorded either. Install "
            "celery-singlebeat there, too, and start the worker again"
        )
        yield Finding("problem", "workers without singlebeat", text)
    found = {*versions.values(), __version__} - {""}
    if len(found) > 1:
        which = {f"{version} on {worker}" for worker, version in versions.items() if version}
        text = (
            f"{', '.join(sorted(which))}, {__version__} here: install the same version everywhere, because an older "
            "version may not understand the data of a newer version in messages and Redis"
        )
        yield Finding("warning", "versions of singlebeat differ", text)
