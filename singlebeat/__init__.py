"""Celery beat that never loses or doubles a run, and tasks that never pile up.

Three parts, each of use alone::

    beat/    the scheduler: claims each due occurrence once, and sends it under a lock
    tasks/   Celery's task side: Singleton, exclusive(), and the workers that look after locks
    locks/   who may run: one record per unique call, with an owner, a state, a lease and a fence

``beat`` and ``tasks`` import nothing from one another: they meet in the record of a lock. ``cli`` stands on all three.
The package of each part explains it in its docstring. What is imported from here is public, and so are
``singlebeat.errors``, ``singlebeat.signals`` and ``singlebeat.embedded``; any other name may change with any release.

Every word below means one thing, in code, log events, metrics, history and docs:

=============== ==========================================================================================
entry           a line of the schedule: task, arguments, times, options, policy; RedBeat's hash in Redis
occurrence      one nominal time of an entry, with an id computed from both: the id of the task
decision        what beat has decided about an occurrence: dispatched, buffered, skipped, missed, ...
run             the execution of a task for one message
run outcome     how a run ended: success, failure, expired, message_lost, ...
due             its nominal time and its jitter have passed, and it is not decided
pending         claimed, and not yet confirmed: its message may or may not have been sent
claim           take an occurrence in Redis: moves its entry on, and makes it pending; once for each occurrence
confirm         record the decision about a pending occurrence, which ends its being pending
one write       claim, lock, message and decision in one script: all of it happens, or nothing
outbox          keeps a message as the commands that send it, for one write
marker          a string that proves that a connection leads to the server of a script
retake          try a pending occurrence again, under the same id
pause           lets times pass without a run: of one entry (its policy), or of many (all, or those with a tag)
tag             the name of a group of entries
change          of a definition, a policy or a pause of many, with its *actor* and means; recorded in the same step
quarantine      where an unusable entry is kept, with the reason, until it is usable again
witness         a member of the schedule's sorted set; if most witnesses lose their places, the set was removed
leader          the beat whose term it is; every other beat is a *standby*, and campaigns to lead next
lease           leadership for a bounded time, renewed by a thread; lost if it is not renewed
term            one unbroken period of leadership, with a number that rises from term to term
fence           a number that rises; a writer with a lower one is refused: of terms, and of runs (*fencing number*)
lock            what a call acquires before it is sent or started, and its worker renews while it runs
acquire         take a lock; *begin*: make it running; *finish*: free it
ticket          what a message knows about its locks; it travels in a header
generation      rises with each retry and replace of a task: an older message of the task holds nothing any more
nonce           names one delivery of a message, so that a copy of it is told from the run
turn, place     what a waiting call holds behind the lock: a place of its own, or the turn of those that run themselves
overlap         the policy for a call that meets an equal one: skip, raise, buffer_one, buffer_all, ...
lock mode       when a task holds its lock: until_executed, while_executing, ...
=============== ==========================================================================================
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .failed_receivers import note_failed_receivers

if TYPE_CHECKING:
    from .beat.calendar.clocked import clocked
    from .beat.entries.entry import Entry
    from .beat.schedule import Schedule
    from .beat.scheduler import Scheduler
    from .errors import DuplicateTaskError
    from .locks import clear_locks
    from .tasks.exclusive import exclusive
    from .tasks.singleton import Singleton
    from .tasks.worker_step import install

__all__ = (
    "DuplicateTaskError",
    "Entry",
    "Schedule",
    "Scheduler",
    "Singleton",
    "clear_locks",
    "clocked",
    "exclusive",
    "install",
)

note_failed_receivers()  # the celery command imports this package before it loads an app

_HOMES = {
    "Scheduler": "beat.scheduler",
    "Entry": "beat.entries.entry",
    "Schedule": "beat.schedule",
    "clocked": "beat.calendar.clocked",
    "Singleton": "tasks.singleton",
    "exclusive": "tasks.exclusive",
    "install": "tasks.worker_step",
    "clear_locks": "locks",
    "DuplicateTaskError": "errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("celery-singlebeat")
        except PackageNotFoundError:  # a copy that was not installed
            return "unknown"
    # On first use only: a program that wants a Singleton must not import RedBeat, which listens to every beat.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
