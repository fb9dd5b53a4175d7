"""Reports the ends of runs: to receivers of a signal, and from a separate thread to the schedule if beat sent them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from kombu.utils.encoding import safe_repr

from . import signals
from .config import Config
from .locks.base import HEADER, RUN_HEADER
from .log import LONGEST_REASON, Log, without_passwords
from .monitors import close_check_in
from .native_threads import Empty, SimpleQueue, await_native, start_native_thread
from .server_errors import with_advice

if TYPE_CHECKING:
    from billiard.einfo import ExceptionInfo
    from celery import Celery

    from .clients import RedisClient
    from .locks.base import Headers
    from .tasks.request import Request

__all__ = (
    "DUPLICATE_REFUSED",
    "MESSAGE_LOST",
    "OUTCOMES",
    "RAN_ELSEWHERE",
    "RESULT_NOT_STORED",
    "UNSEEN",
    "flush_ends",
    "is_result_lost",
    "may_be_unsent",
    "outcome_of",
    "reason_of",
    "record_end",
    "record_end_of_message",
)

log = Log(__name__)

#: Most ends that one step writes, and that wait to be written; further ends are dropped.
BATCH, MOST = 500, 10_000

#: Seconds that the schedule's server may take, and for which it is not asked again after a failure.
TIMEOUT, PAUSE = 2.0, 10.0

#: Number of ends of last runs that an entry keeps: enough to show that the runs keep failing.
KEPT_ENDS = 4

#: The end of a message that must not run.
DUPLICATE_REFUSED = "duplicate_refused"

#: The end of a message that another call has evicted before it started.
REPLACED = "replaced"

#: The end of a run whose body has returned, and whose result the result backend did not store.
RESULT_NOT_STORED = "result_not_stored"

#: The frame of Celery that stores the result of a body that has returned, in a traceback.
_STORING = re.compile(r'[/\\]celery[/\\]backends[/\\]base\.py", line \d+, in mark_as_done$', re.MULTILINE)

#: The frame of Celery that sends what follows a body that has returned: callbacks, and the next step of a chain.
_SENDING = re.compile(r'[/\\]celery[/\\]app[/\\]trace\.py", line \d+, in _dispatch_callbacks_and_chain$', re.MULTILINE)

_OUTCOMES = {
    Retry: "retry",
    Ignore: "ignored",
    Reject: "rejected",
    WorkerLostError: "worker_lost",
    TimeLimitExceeded: "time_limit",
    Terminated: "terminated",
}

#: Ends that no worker with singlebeat has seen.
MESSAGE_LOST, RAN_ELSEWHERE = "message_lost", "ran_elsewhere"

#: Every word for an end that a worker sees, with its meaning, which the reference in the docs prints.
OUTCOMES: Mapping[str, str] = {
    "success": "The body has returned.",
    RESULT_NOT_STORED: "The body has returned, and the result backend did not store its result.",
    "failure": "The body has raised an error, or the worker could not hand the run over to its pool.",
    "retry": "The task is sent again for a retry.",
    "ignored": "The body has raised ``Ignore``, or the task was replaced.",
    "rejected": "The body has raised ``Reject``, or the worker has rejected the message.",
    "worker_lost": "The process that ran the task has died.",
    "time_limit": "The task has run for longer than its hard time limit.",
    "terminated": "The run was terminated by ``revoke(terminate=True)``.",
    DUPLICATE_REFUSED: "The run did not start, because an equal call runs, or because its id has run before.",
    REPLACED: "The run did not start: a newer call has taken its place (``cancel_other``, ``terminate_other``).",
    "postponed": "The message was sent again to wait for its turn. A later end is recorded, too.",
    "revoked": "The task was revoked before its start.",
    "expired": "The message had passed its ``expires`` before its start.",
    "unknown_task": "The worker has no task of this name.",
}

#: The words for the other ends, which beat records when it frees the lock.
UNSEEN: Mapping[str, str] = {
    MESSAGE_LOST: "The message is gone. Beat has freed its lock.",
    RAN_ELSEWHERE: "The task has ended, and its worker left its lock: it may lack singlebeat. Beat has freed the lock.",
}


def outcome_of(exc: BaseException) -> str:
    """Return the word for a run that ended with an exception."""
    return next((word for kind, word in _OUTCOMES.items() if isinstance(exc, kind)), "failure")


def is_result_lost(exc_info: ExceptionInfo, *, is_stored: bool) -> bool:
    """Return whether a run failed only because the result of its body could not be stored.

    Celery then reports the error of the result backend as that of the run, and stores that error if it can.

    Args:
        is_stored: whether the result backend has an end of the run.
    """
    is_outside = exc_info.internal or not is_stored  # a result that cannot be encoded is an error of the task
    return is_outside and _STORING.search(exc_info.traceback or "") is not None


def may_be_unsent(exc_info: ExceptionInfo) -> bool:
    """Return whether a run failed outside of its body, so that what follows it may be unsent."""
    return exc_info.internal or _SENDING.search(exc_info.traceback or "") is not None


def reason_of(exc: object) -> str:
    """Return the ``repr`` of a task's exception, without the arguments that Celery quotes when retries are used up."""
    text = str(safe_repr(exc))
    return f"{text.partition(' args:')[0]}…" if isinstance(exc, MaxRetriesExceededError) else text


def record_end(
    request: Request, outcome: str, reason: str | BaseException = "", *, seconds: float | None = None
) -> None:
    """Send the signal about the end of a run, once, and record the end if beat sent the run; does not wait.

    Args:
        seconds: as in ``record_end_of_message``.
    """
    if request.end_told:
        return
    request.end_told = True
    about = {"worker": request.hostname, "began": request.time_start, "seconds": seconds}
    record_end_of_message(request.app, request.request_dict, outcome, reason, **about)


def record_end_of_message(
    app: Celery,
    headers: Headers,
    outcome: str,
    reason: str | BaseException = "",
    *,
    worker: str | None = None,
    began: float | None = None,
    seconds: float | None = None,
) -> None:
    """Send the signal about the end of a message, known by its headers, and record the end if beat sent it.

    Args:
        began: when the run began, in seconds since 1970; None if it did not.
        seconds: that the run took, as its process has measured them; None: it has lasted until now.
    """
    header = headers.get(RUN_HEADER)
    if header or HEADER in headers:
        signals.run_ended.send(sender=app, outcome=outcome, began=began, headers=headers)
    if outcome in {DUPLICATE_REFUSED, REPLACED}:
        close_check_in(headers)
    if outcome == "postponed":  # the end of the message that was sent again is recorded
        return
    if isinstance(header, Mapping) and header.get("entry") and Config.of(app).singlebeat_history_limit:
        # Only here: beat has not sent most runs, and the repr of a user's exception may fail.
        reason = reason if isinstance(reason, str) else reason_of(reason)
        if began and seconds is None:
            seconds = max(0.0, time.time() - began)
        row = (
            str(header["entry"]),
            str(headers.get("id")),
            outcome,
            without_passwords(reason)[:LONGEST_REASON],
            datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds") if began else "",
            f"{seconds:.3f}" if began else "",
            worker or "",
        )
        _writer(app).put(row)


def flush_ends(app: Celery) -> None:
    """Wait until the ends so far are recorded, for a few seconds at most."""
    if (app, os.getpid()) in _writers:
        done: SimpleQueue[None] = SimpleQueue()
        _writers[app, os.getpid()].put(done)
        await_native(done, timeout=TIMEOUT)


class _Writer:
    """A thread that writes ends in batches; an end that cannot be written is lost, and no task waits for it."""

    def __init__(self, app: Celery) -> None:
        # Imported only now, because a worker that runs nothing of beat's may have no Redis. Not in the thread: a child
        # that is forked during the import would never get the import system's locks.
        from .connections import schedule_client  # noqa: PLC0415
        from .lua import Script, packed  # noqa: PLC0415

        self._connect, self._script, self._packed = schedule_client, Script(__package__, "record_ends"), packed
        config = Config.of(app)
        self.app, self.prefix, self.limit = app, config.redbeat_key_prefix, config.singlebeat_history_limit
        self._news: SimpleQueue[tuple[str, ...] | SimpleQueue[None]] = SimpleQueue()
        self._client: RedisClient = None
        self._silent_until = 0.0
        self._failed = False
        start_native_thread(self._run, "singlebeat-ends")

    def put(self, news: tuple[str, ...] | SimpleQueue[None]) -> None:
        if self._news.qsize() < MOST:
            self._news.put(news)

    def _run(self) -> None:
        while True:
            news = [self._news.get()]
            with suppress(Empty):
                while len(news) < BATCH:
                    news.append(self._news.get_nowait())
            rows = [each for each in news if isinstance(each, tuple)]
            try:
                if rows and time.monotonic() >= self._silent_until:
                    self._write(rows)
                    if self._failed:
                        self._failed = False
                        log.warning("the ends of runs are recorded again", event="recovered")
            except Exception as exc:  # the outer edge of the thread: no Redis, or no schedule in it
                self._failed = True
                log.warning(
                    "the ends of %(runs)d runs, and of those that end in the next %(seconds)g s, are not recorded",
                    event="ends_not_recorded",
                    runs=len(rows),
                    seconds=PAUSE,
                    reason=with_advice(exc),
                )
                self._silent_until = time.monotonic() + PAUSE
            for each in news:
                if not isinstance(each, tuple):
                    each.put(None)

    def _write(self, rows: Sequence[tuple[str, ...]]) -> None:
        self._client = self._client or self._connect(self.app, timeout=TIMEOUT)
        entries = [self.prefix + row[0] for row in rows]
        self._script(self._client, [f"{self.prefix}:runs", *entries], (self.limit, KEPT_ENDS, self._packed(rows)))


_writers: dict[tuple[Celery, int], _Writer] = {}


def _writer(app: Celery) -> _Writer:
    key = app, os.getpid()  # a forked child gets its own writer
    if key not in _writers:
        _writers[key] = _Writer(app)
    return _writers[key]
