"""Checks workers: their queues, tasks, slots, versions and clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from ... import __version__
from ...advice import listed, sentence, to_read
from ...beat.delivery import PREFETCH, Delivery, queue_of, unless
from ...beat.entries.permission import tasks_called
from ...beat.entries.statics import owner_of
from ...beat.server_time import DIFFERS_FROM, UNFIT_FROM
from ...beat.status import counted
from ...beat.store.probe import lock_place
from ...config import Config
from ...connections import RedisError, broker_place
from ...errors import ConfigError, LockBackendError, SinglebeatError
from ...locks import backend_of
from ...locks.modes import LockMode, is_singleton, overlap_for
from ...locks.redis import RedisBackend
from ...overlap import Overlap
from ..locks import every
from ..workers import (
    NoQuestionsError,
    Workers,
    ahead_of_server,
    last_seen,
    leaving_workers,
    silent_workers,
    unheard,
    unknown_workers,
)
from .entries import why_over
from .finding import MOST_NAMED, Finding, Read, of_locks

if TYPE_CHECKING:
    from celery import Celery, Task

    from ...beat.entries.entry import Entry

#: Seconds for which a queue's workers may be busy with the same runs before that is a warning, though its messages have
#: all been received.
BUSY_FOR = 5.0

#: Maximum number of locks that are read to find a renewed lock.
MOST_LOCKS = 1000


def check_workers(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check that workers answer, know the tasks, read the queues and look after locks."""
    wrong, answer = schedule.locks_error, schedule.workers is not None and any(schedule.workers.versions.values())
    if wrong is not None:
        yield of_locks(app, wrong) if isinstance(wrong, LockBackendError) else Finding("problem", "locks", str(wrong))
    elif not schedule.workers_seen and answer and isinstance(backend_of(app), RedisBackend):
        text = (
            "workers with singlebeat answer, and none has announced itself at the locks' server yet, which may have "
            f"been emptied: they do so within {Config.of(app).singlebeat_lock_lease / 3:.0f} s. If this stays, their "
            "singleton_backend_url is another one"
        )
        yield Finding("warning", "workers", text)
    elif not schedule.workers_seen:
        plain = (entry for entry in _locked(app, schedule) if not is_singleton(app.tasks.get(entry.task)))
        names = listed(sorted(entry.name for entry in plain))
        which = f", so that runs of {names} may overlap" if names else ""
        why, to_do = "no worker with singlebeat was seen", "; install it there, too"
        if answer:
            why, to_do = f"the lock backend {backend_of(app).name} knows no workers", ""
        text = f"{why}: plain tasks are sent without a lock{which}{to_do}"
        yield Finding("warning", "workers", text)
    workers = schedule.workers
    if workers is None:
        yield _unreachable(app, schedule)
        return
    if not workers.known_tasks:
        yield _none_answers(app, schedule)
        return
    yield Finding("fine", "workers", f"{len(workers.known_tasks)} answer")
    yield from _namesakes(workers)
    if wrong is None and (leaving := listed(leaving_workers(app))):
        text = (
            f"shutting down, or ended in the last {Config.of(app).singlebeat_lock_lease:g} s: {leaving}. A worker that "
            "shuts down ends its last tasks, answers no question, and gives back at its end the messages that it has "
            "not started"
        )
        yield Finding("warning", "workers", text)
    without = sorted(worker for worker, found in workers.versions.items() if not found)
    if without and wrong is None and schedule.workers_seen:
        queues = frozenset().union(*(reader.queues for name, reader in workers.readers.items() if name in without))
        entries = [entry.name for entry in _locked(app, schedule) if queue_of(app, entry) in queues]
        yield _without_singlebeat(app, without, sorted(entries))
    yield from _unheard(app, schedule, workers)
    yield from _versions(workers.versions)
    if schedule.error is not None:
        return
    yield from _clocks(app, workers)
    silent = silent_workers(app, workers) if wrong is None else ()
    if schedule.state.is_led_by(owner_of(app)):
        yield from _queues(app, schedule, workers, silent)
    yield from _unknown_tasks(schedule, workers, silent)


def _namesakes(workers: Workers) -> Iterator[Finding]:
    """Check for workers of one name, of which Celery answers for one only."""
    for name in sorted(workers.namesakes):
        text = f"several are called {name}, and only one of them is checked here: give each a name of its own (-n w@%h)"
        yield Finding("problem", "workers", text)


def _unreachable(app: Celery, schedule: Read) -> Finding:
    """Return the finding about a broker that this process could not ask."""
    effect, place = "messages cannot be sent", broker_place(app)
    if isinstance(schedule.broker_error, NoQuestionsError):
        effect = "so doctor knows nothing about the workers. It needs the keys *.pidbox*, _kombu* and unacked*"
    elif _may_send(schedule):
        effect = "this process cannot send messages. Beat may still do so, as long as its present connection lasts"
    elif schedule.error is not None and place.startswith("sentinel://"):
        effect = "this process cannot send messages. A beat that is still connected to the master may do so"
    text = f"it {str(schedule.broker_error).rstrip('.')}; {effect}"
    return Finding("problem", f"broker {place}", text)


def _queues(app: Celery, schedule: Read, workers: Workers, silent: Sequence[str]) -> Iterator[Finding]:
    """Check for queues of entries that no worker reads, or whose workers lack a task or have no free slot."""
    by_queue: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in schedule.usable:
        if entry.enabled and (queue := queue_of(app, entry)):
            by_queue[queue].append(entry)
    now = datetime.now(UTC)
    for queue, senders in by_queue.items():
        delivery = Delivery.of(queue, workers.readers, silent)
        if delivery.unread:
            advice = f"{to_read(queue)}, or correct the queue of the entries, or task_routes"
            if apps := sorted({other for entry in senders for other in schedule.foreign.get(entry.name, ())}):
                advice = replace(delivery, other_apps=apps).left_alone
            text = (
                f"{delivery.unread}: {delivery.unless_read}the runs of "
                f"{listed(sorted(entry.name for entry in senders))} wait there. "
                f"{waiting_in(schedule, queue)}{sentence(advice)}"
            )
            yield Finding("warning" if silent else "problem", f"queue {queue}", text)
        for entry in senders:
            if wrong := delivery.without(entry.task):
                yield Finding("problem", f"entry {entry.name}", wrong)
        since = delivery.full_since
        if since is not None and ((now - since).total_seconds() > BUSY_FOR or schedule.backlog.count(queue)):
            advice = (
                "Start more workers, or make these tasks shorter. Messages that a busy worker has already received "
                f"stay with it. {PREFETCH}"
            )
            if schedule.results:
                advice = f"The result backend may be the cause, because it {schedule.results}: fix that first"
            text = f"{delivery.full}: other messages wait. {advice}"
            yield Finding("warning", f"queue {queue}", text)


def waiting_in(schedule: Read, queue: str) -> str:
    """Return a sentence about the messages in a queue, with a space after it; empty if there are none."""
    count = schedule.backlog.count(queue)
    return f"The queue has {counted(count, 'message', 'messages')}. " if count else ""


def _none_answers(app: Celery, schedule: Read) -> Finding:
    """Return the finding if no worker answers: a worker that ends its last tasks does not answer any more."""
    lease = Config.of(app).singlebeat_lock_lease
    lives = listed(sorted(worker for worker, age in last_seen(app).items() if age < lease))
    if lives and not app.conf.worker_enable_remote_control:
        text = (
            f"no worker answers; {lives}: seen at the locks' server less than {lease:g} s ago. Workers answer no "
            "question while worker_enable_remote_control is off, so their queues, tasks and slots are not checked, nor "
            "whether they reach the broker"
        )
        return Finding("warning", "workers", text)
    with suppress(SinglebeatError):
        held = () if schedule.locks_error else islice(every(app), MOST_LOCKS)
        locks = (lock for lock in held if lock.state == "running")
        renewed = [lock for lock in locks if lock.renewed is not None and not lock.seems_abandoned]
        if lock := min(renewed, key=lambda lock: lock.renewed or 0.0, default=None):
            since = f"{max(1.0, min(lock.renewed or 0.0, lease)):.0f} s"
            text = (
                f"no worker answers, but {lock.worker or 'one'} renewed the lock of task {lock.task_id} {since} ago: "
                f"it shuts down and ends its last tasks, is too busy, or has died within the last {since}. Without "
                "another worker, messages wait in their queues"
            )
            return Finding("warning", "workers", text)
    waits = "messages wait in their queues" if _has_messages(app, schedule) else "no run starts"
    seen = (
        f". {lives} renewed locks less than {lease:g} s ago: it does not reach this broker, hangs, has died since, or "
        "has worker_enable_remote_control switched off; then set that for this process, too"
    )
    return Finding("problem", "workers", f"no worker answers: {waits}{seen if lives else ''}")


def _has_messages(app: Celery, schedule: Read) -> bool:
    """Return whether messages are known to wait in the queue of calls, or in one of the first few of entries."""
    queues = {app.conf.task_default_queue}
    with suppress(RedisError):  # an earlier part has reported it
        queues |= {queue for entry in schedule.usable if (queue := queue_of(app, entry))}
    return any(schedule.backlog.count(queue) for queue in islice(sorted(queues), MOST_NAMED))


def _may_send(schedule: Read) -> bool:
    """Return whether a beat works, and is not known to fail: it may reach a broker that this process does not."""
    with suppress(RedisError):  # an earlier part has reported it
        state = schedule.state
        return state.works and not (schedule.refused or state.overdue or state.pending)
    return False


def _clocks(app: Celery, workers: Workers) -> Iterator[Finding]:
    """Check for workers whose clock differs from the clock of the schedule's server, which beat uses."""
    for worker, ahead in workers.wrong_clocks(ahead_of_server(app), more_than=DIFFERS_FROM):
        text = (
            f"the clock of worker {worker} is about {ahead:+.0f} s off that of the schedule's server: set up NTP on "
            "both. Countdown, eta and expires of messages go by the clocks of their hosts"
        )
        yield Finding("problem" if abs(ahead) > UNFIT_FROM else "warning", "clock", text)


def _unknown_tasks(schedule: Read, workers: Workers, silent: Sequence[str]) -> Iterator[Finding]:
    """Check that workers know the tasks of entries, and those that these make run."""
    known = frozenset().union(*workers.known_tasks.values())
    now = datetime.fromtimestamp(schedule.state.now, UTC)
    for entry in schedule.usable:
        if not entry.enabled or why_over(entry, now):
            continue
        if called := tasks_called(entry) - known:
            text = f"no worker that answers knows {listed(sorted(called))}, which its message makes run (link, chain): "
            text += f"{unless(silent, 'know')}a worker that gets that call drops it"
            yield Finding("warning", f"entry {entry.name}", text)
        if entry.task not in known:
            text = f"no worker that answers knows its task {entry.task}: {unless(silent, 'know')}"
            text += "a worker that gets the message drops it"
            if apps := schedule.foreign.get(entry.name):
                text += f". It is an entry of app {listed(apps)}: leave it to that app"
            is_paused = entry.policy.paused  # it sends none until it is resumed
            yield Finding("warning" if is_paused or silent else "problem", f"entry {entry.name}", text)


def _locked(app: Celery, schedule: Read) -> Sequence[Entry]:
    """Return the entries whose locks beat acquires, and workers with singlebeat free.

    Entries that do not run, or that another app sends, are left out.
    """
    with suppress(RedisError):  # an earlier part has reported it
        if schedule.state.is_led_by(owner_of(app)):
            active = (entry for entry in schedule.usable if entry.enabled and not entry.policy.paused)
            return [entry for entry in active if _is_locked(app.tasks.get(entry.task), entry.policy.overlap)]
    return ()


def _is_locked(task: Task | None, overlap: Overlap | None) -> bool:
    """Return whether beat acquires a lock for a task, and a worker frees it."""
    if not is_singleton(task):
        return overlap is not Overlap.ALLOW_ALL and not hasattr(task, "generate_lock")  # of celery-singleton
    with suppress(ConfigError):  # its policy contradicts its task
        is_freed = LockMode(task.lock) not in {LockMode.WHILE_EXECUTING, LockMode.UNTIL_EXPIRED}
        return is_freed and overlap_for(task, overlap) is not Overlap.ALLOW_ALL
    return False


def _without_singlebeat(app: Celery, workers: Sequence[str], entries: Sequence[str]) -> Finding:
    """Return the finding about workers without singlebeat beside workers that have it.

    Args:
        entries: names of the entries with locks whose queues these workers read.
    """
    which = f" That concerns the entries whose queues it reads: {listed(entries)}." if entries else ""
    text = (
        f"{', '.join(workers)}: no singlebeat there, or its settings name no server for locks. When such a worker "
        "runs a task whose lock beat has acquired, it leaves that lock as it is, and the next runs are "
        "skipped until beat finds that out: most of a minute, or while messages wait in the queue up to "
        f"{Config.of(app).singlebeat_queued_ttl:g} s (singlebeat_queued_ttl).{which} How the run ended is not recorded "
        "either. Install celery-singlebeat there, too, and start the worker again"
    )
    return Finding("problem", "workers without singlebeat", text)


def _unheard(app: Celery, schedule: Read, workers: Workers) -> Iterator[Finding]:
    """Check for workers that answer, and do not reach the locks' server, or are refused there."""
    if schedule.locks_error is None and (away := unheard(app, workers)):
        text = (
            f"{listed(away)}: each answers, and has renewed nothing at the locks' server for that time. So it frees no "
            "lock, and its runs go on without their locks once these end. Its log says why (not_renewed): as the "
            "network, a wrong password in singleton_backend_url, or a command that its user lacks there"
        )
        yield Finding("problem", "workers", text)
    if schedule.locks_error is not None or not schedule.workers_seen:  # it is said elsewhere
        return
    for worker in unknown_workers(app, workers):
        reader = workers.readers[worker]  # it may be of another app, with other tasks or queues
        known = (entry for entry in _locked(app, schedule) if entry.task in reader.tasks)
        if names := sorted(entry.name for entry in known if queue_of(app, entry) in reader.queues):
            text = (
                f"{worker} answers and runs {listed(names)}, and has not announced itself at the locks' server "
                f"{lock_place(app)}. If that lasts, it looks after locks on another server: it frees none here, so "
                "further runs are skipped until beat takes each message for lost. Let its settings name this one "
                "(singleton_backend_url, else result_backend)"
            )
            yield Finding("problem", "workers", text)


def _versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the versions of singlebeat in the workers and in this process."""
    found = {*versions.values(), __version__} - {""}
    if len(found) > 1:
        which = {f"{version} on {worker}" for worker, version in versions.items() if version}
        text = (
            f"{', '.join(sorted(which))}, {__version__} here: install the same version everywhere, because an older "
            "version may not understand the data of a newer version in messages and Redis"
        )
        yield Finding("warning", "versions of singlebeat differ", text)
