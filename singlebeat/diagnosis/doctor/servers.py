"""Checks servers, rights and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...beat.keys import Keys
from ...beat.one_write import why_several_writes
from ...beat.result_backend import result_place
from ...beat.store.probe import broker_refusal, lock_place
from ...beat.store.server import Server
from ...beat.store.spoilt import spoilt_keys
from ...broker import bounded
from ...config import Config
from ...connections import home_among_brokers, is_one_server, is_redis, masked, schedule_client, schedule_place
from ...errors import SinglebeatError
from ...locks import backend_of
from ...locks.redis import RedisBackend
from ...locks.send import why_two_writes
from ...server_errors import NO_CONNECTION, is_crowded, is_login_refused
from .finding import Finding, Read

if TYPE_CHECKING:
    from celery import Celery

#: What ``task_always_eager`` does to beat.
EAGER = (
    "it is set: beat runs the tasks itself, one after the other, and sends no messages. Entries are late meanwhile, "
    "and a run that takes longer than singlebeat_watchdog_timeout ends beat. Set it in tests only"
)

#: Why one of several brokers is no home of a schedule.
HOME_AMONG_BROKERS = (
    "names several brokers, and {home}, one of them, also keeps the schedule or locks: when it fails, workers change "
    "to the next broker and stay there, while beat sends to {home} again as soon as it is back, and no worker reads "
    "that. Set redbeat_redis_url and singleton_backend_url to another server, or restart the workers after each failure"
)

#: Seconds after which kombu's Redis transport delivers an unacknowledged message again by default.
VISIBILITY_TIMEOUT = 3600

#: The oldest server version that has all commands that singlebeat needs.
OLDEST_SERVER = (6, 2)


def check_server(app: Celery, _: Read) -> Iterator[Finding]:
    """Check the version and the settings of the schedule's server."""
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
    if server.kept is None:
        text = (
            "it keeps snapshots at most (appendonly no), and its user may not ask whether it does (grant +config|get): "
            "a restart loses the writes since the last one; use appendonly yes"
        )
        yield Finding("warning", about, text)
    if server.kept == "snapshots":
        text = (
            "it keeps snapshots only (appendonly no): a restart loses the writes since the last snapshot, so "
            "entries may be as they were then, and runs that have ended may run once more; use appendonly yes"
        )
        yield Finding("warning", about, text)


def check_keys(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for keys of the schedule that beat cannot use: spoilt by another program, or denied to its user."""
    if schedule.error is not None:
        return
    for spoilt in spoilt_keys(schedule_client(app), Keys.of(app)):
        yield Finding("problem", f"key {spoilt.key}", f"it {spoilt.why}, and beat cannot use it: {spoilt.advice}")


def check_rights(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check that no server refuses a command; ``check_workers`` checks that the locks' server answers."""
    if schedule.error is None and schedule.refused:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule.refused)
    if schedule.locks_error is None and schedule.locks_refused:
        yield Finding("problem", f"locks' server {lock_place(app)}", schedule.locks_refused)


def check_result_backend(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check the result backend, which beat does not use, unless the schedule or the locks are on its server."""
    wrong = schedule.results
    if is_crowded(wrong):  # what is connected works on, so none of the rest holds
        yield Finding("problem", result_place(app), f"it {wrong}. {NO_CONNECTION}")
    elif wrong:
        place, sent = result_place(app).removeprefix("result backend "), "Beat still sends, but workers wait"
        if schedule.is_result_backend_away_with_schedule:
            sent = "The schedule is kept there, too: nothing is sent until it answers"
            if place.startswith("sentinel://"):
                sent += ", but by a beat that is still connected to the master"
            sent += ". Workers wait"
        elif schedule.locks_error is not None and is_one_server(place, lock_place(app)):
            sent = "Locks are kept there, too: no run that takes a lock is sent until it answers. Workers wait"
        advice = "Start the backend, or correct result_backend"
        if is_login_refused(wrong):
            advice = "Correct the user and the password in result_backend"
        text = (
            f"it {wrong}. {sent} for the backend after the body of each task, and hold the slot meanwhile. Then the "
            f"run ends without a result, and callers that wait for one get none. {advice}"
        )
        yield Finding("problem", result_place(app), text)


def check_prefixes(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for locks and entries under one prefix, in one database."""
    config = Config.of(app)
    locks, entries = config.singleton_key_prefix, config.redbeat_key_prefix
    if schedule.locks_error is not None or not (locks.startswith(entries) or entries.startswith(locks)):
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


def check_settings(app: Celery, _: Read) -> Iterator[Finding]:
    """Check for settings that are valid, and seldom meant."""
    config = Config.of(app)
    if app.conf.task_always_eager:
        yield Finding("problem", "task_always_eager", EAGER)
    if config.redbeat_lock_timeout < 2:
        text = f"{config.redbeat_lock_timeout:g} s is short: a pause of the host or of Redis costs leadership"
        yield Finding("warning", "redbeat_lock_timeout", text)
    if config.singlebeat_lock_lease < 3 * config.singlebeat_socket_timeout:
        text = (
            f"{config.singlebeat_lock_lease:g} s leave no time for a second renewal when one call takes "
            f"singlebeat_socket_timeout ({config.singlebeat_socket_timeout:g} s): use at least three times that timeout"
        )
        yield Finding("warning", "singlebeat_lock_lease", text)
    with suppress(SinglebeatError):  # another part names a server that is not set
        if home := home_among_brokers(app):
            yield Finding("problem", "broker_url", HOME_AMONG_BROKERS.format(home=home))
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


def visibility_timeout(app: Celery) -> float:
    """Return the seconds after which the broker delivers an unacknowledged message again; infinite if it never does."""
    if not is_redis(app.conf.broker_url):
        return math.inf
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout", VISIBILITY_TIMEOUT)
    return float(given)


def _visibility(app: Celery) -> Iterator[Finding]:
    given = visibility_timeout(app)
    for task in app.tasks.values():
        limit = task.time_limit or app.conf.task_time_limit
        if task.acks_late and not task.name.startswith("celery.") and limit and limit > given:
            text = (
                f"its time limit of {limit} s is longer than the broker's visibility_timeout of {given:g} s: "
                "its message is delivered again while it runs (singlebeat refuses the copy); raise the timeout"
            )
            yield Finding("warning", f"task {task.name}", text)


def describe_writes(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Tell in how many writes calls take their locks and are sent, and due entries as well; nothing if rights lack."""
    if schedule.locks_error or not schedule.broker_answers or schedule.locks_refused:
        return
    if schedule.error is None and schedule.refused:
        return
    with suppress(Exception), bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout) as broker:
        # An error of a server is named by the other parts.
        if broker_refusal(app):
            return
        why = why_two_writes(app, broker)
        text = "they take their locks and are sent in one write: a sender that is killed leaves both or neither"
        several = f"they take their locks and are sent in two writes: {why}"
        yield Finding("fine", "calls of Singletons", several if why else text)
        if schedule.error is not None or schedule.state.redbeat_leads:
            return
        why = why_several_writes(app, broker)
        text = "they are claimed, locked, sent and recorded in one write: their messages are sent exactly once"
        several = f"they are claimed, locked, sent and recorded in several writes, so sent at least once: {why}"
        yield Finding("fine", "due entries", several if why else text)
