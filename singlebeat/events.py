"""Every event that singlebeat logs, with its levels and its meaning; the reference in the docs prints this table."""

from __future__ import annotations

from collections.abc import Mapping
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING
from typing import NamedTuple

__all__ = ("EVENTS", "Event")


class Event(NamedTuple):
    """One event: its levels, the usual one first, and its meaning in reStructuredText."""

    levels: tuple[int, ...]
    meaning: str

    @property
    def level(self) -> int:
        """The usual level."""
        return self.levels[0]


EVENTS: Mapping[str, Event] = {
    # Who leads.
    "leadership_gained": Event(
        (INFO, WARNING),
        "This beat leads: ``term``, ``leader``. WARNING if this beat has stood by or led before. "
        "``reason``: the leader before, if it has not renewed the lock.",
    ),
    "leadership_lost": Event(
        (WARNING,),
        "This beat does not lead any more, and stands by. ``term``: the one that is over.",
    ),
    "stands_by": Event(
        (INFO, WARNING),
        "Another beat leads: ``leader``, ``term``, ``since``. WARNING if this beat has led or stood by before.",
    ),
    "share_left": Event(
        (WARNING,),
        "Where beats share the work (``redbeat_lock_key = None``): ``beat``, another one, gives no sign of life any "
        "more. The others send its part of the due entries.",
    ),
    "share_joined": Event((INFO,), "Where beats share the work: ``beat``, another one, does so, too, from now on."),
    "leaderless": Event(
        (ERROR,),
        "This beat stands by, and no beat can lead: another program has spoilt a key of leadership: ``reason``.",
    ),
    "lock_released": Event((INFO,), "This beat has given up leadership at its end."),
    "lease_nearly_lost": Event(
        (WARNING,),
        "A renewal of leadership came so late that only ``left`` seconds were left.",
    ),
    "not_renewed": Event(
        (WARNING,),
        "Leadership, or the locks of a worker, could not be renewed: ``reason``. ``left``: seconds that are left.",
    ),
    "not_announced": Event(
        (WARNING,),
        "The locks' server denies this worker the announcement that it frees locks: ``reason``. It frees them all the "
        "same, and others may take it for a worker without singlebeat.",
    ),
    "other_app": Event(
        (WARNING,),
        "This beat leads over ``entries`` of the app ``other``, or stands by for a beat of that app: ``reason``.",
    ),
    "tick_ended": Event((WARNING,), "A tick took more than 10 s: ``seconds``."),
    "stuck": Event(
        (CRITICAL,),
        "This beat makes no progress and ends, with its stacks in the log (``singlebeat_watchdog_timeout``).",
    ),
    "orphaned": Event((CRITICAL,), "The main process of ``worker -B`` is gone, so this beat ends."),
    # What beat has decided.
    "dispatched": Event((INFO,), "A run was sent. ``lateness``: seconds since its nominal time."),
    "buffered": Event((INFO,), "A run was sent, and waits for the end of the task ``holder``."),
    "skipped_overlap": Event(
        (INFO,),
        "A run was not sent, because the task ``holder`` is queued or running. ``holder_entry``: the entry that has "
        "sent that task, if it is another entry.",
    ),
    "run_before": Event((WARNING,), "A run was not sent, because a run with its id has begun or ended before."),
    "missed": Event(
        (WARNING,),
        "A run was not sent, because it was later than ``misfire_grace_time`` or ``end_time`` allows.",
    ),
    "paused": Event((DEBUG,), "A run was not sent, because its entry is paused or disabled, which is intended."),
    "unrecorded": Event(
        (WARNING,),
        "The schedule's server refuses to record that another program has changed an entry: ``reason``. Logged once "
        "for each such change.",
    ),
    "pause_unreadable": Event(
        (WARNING,),
        "A pause of many entries cannot be read: ``reason``. It pauses nothing. Logged once for each reason.",
    ),
    "publish_failed": Event(
        (ERROR,),
        "A run can never be sent: ``reason``, with the traceback once for each reason. The entry goes on with its next "
        "time.",
    ),
    "published": Event((DEBUG,), "The message of a run was sent to the broker."),
    # Entries.
    "quarantined": Event(
        (ERROR,),
        "An entry cannot be used and is quarantined: ``reason``. Logged once for each reason.",
    ),
    "entry_recovered": Event((WARNING,), "A quarantined entry is usable again."),
    "left_out": Event((WARNING,), "``Schedule.list()`` has left out an entry that cannot be used: ``reason``."),
    "not_added": Event(
        (ERROR, WARNING),
        "An entry of ``beat_schedule`` is wrong, cannot be stored, or belongs to another app: ``reason``. Beat tries "
        "it every minute, unless it is edited meanwhile, and logs each new reason. WARNING if a tool has added the "
        "entry to ``beat_schedule``, so that it stays as it is stored.",
    ),
    "taken_over": Event(
        (WARNING,),
        "``beat_schedule`` has an entry now that an operator or another program had stored. It is replaced, and no "
        "longer runs if a deploy takes it out of the code. To have the earlier one again: ``celery singlebeat "
        "changes NAME``, and ``revert``.",
    ),
    "not_imported": Event(
        (WARNING,),
        "A module of tasks cannot be imported where the page runs: ``reason``. Their queues are unknown there, and the "
        "names of positional arguments, by which these are masked.",
    ),
    "added": Event((WARNING,), "An entry of ``beat_schedule`` that could not be stored is stored now."),
    "entry_removed": Event(
        (WARNING,),
        "An entry has left ``beat_schedule`` and is removed; it is kept for seven days. A run of it that is not sent "
        "yet waits as ``reason`` says.",
    ),
    "incomplete": Event(
        (ERROR,),
        "A receiver of ``on_after_configure`` or the like has failed (``reason``), so that ``beat_schedule`` may lack "
        "entries: those that it has no more stay.",
    ),
    "entry_back": Event((INFO,), "An entry is in ``beat_schedule`` again, and has its past and its pause back."),
    "field_ignored": Event((WARNING,), "A definition has a field that no beat knows: ``reason``."),
    "place_corrected": Event(
        (WARNING,),
        "The place of an entry was no time in seconds since 1970, such as one in milliseconds. Beat has put 0 there.",
    ),
    "places_restored": Event(
        (WARNING,),
        "Most places in the sorted set of the schedule were gone, and their entries were not: beat has given "
        "``restored`` entries places again.",
    ),
    "zone_changed": Event(
        (WARNING,),
        "Wall clocks are read in ``zone``, and no longer in ``before``. ``moved``: entries that are due earlier.",
    ),
    "schedule_vanished": Event(
        (WARNING,),
        "Redis has lost the schedule, or its last changes: ``reason``. The leader, or the next leader, installs "
        "``beat_schedule`` again. ``status`` and the page show it for a day, or until a program adds an entry.",
    ),
    "expensive": Event(
        (WARNING,),
        "The times of an entry take long to calculate (``seconds``, or so far if it still goes on after 10 s): other "
        "entries have waited for a second or more, or the entry waits for them. Or your own code is slow that makes "
        "its arguments or its lock key, or that routes or sends it. Logged once for each entry.",
    ),
    # Servers and clocks.
    "unreachable": Event(
        (ERROR,),
        "The broker or the locks' server (``server``) does not answer, or refuses a command: ``reason``. Due "
        "occurrences stay pending.",
    ),
    "trouble": Event(
        (ERROR,),
        "A tick failed because of the schedule's server, or of the broker: ``reason``. Beat tries again. Logged once "
        "for each kind of error.",
    ),
    "recovered": Event(
        (WARNING,),
        "The trouble of an earlier ``trouble``, ``unreachable``, ``not_renewed``, ``not_announced`` or "
        "``ends_not_recorded`` is over. A server that answers reads and refuses writes has not recovered.",
    ),
    "may_evict": Event(
        (WARNING, ERROR),
        "The schedule's server may evict keys: ``reason``. ERROR if ``redbeat_key_expiry_check`` is ``error``.",
    ),
    "several_brokers": Event(
        (WARNING,),
        "The schedule or the locks are on ``server``, which is one of several brokers: if it fails, workers change to "
        "another broker for good, and beat does not.",
    ),
    "eager": Event(
        (WARNING,),
        "``task_always_eager`` is set: beat runs the tasks itself, in its ticks, and sends no messages.",
    ),
    "several_writes": Event(
        (INFO,),
        "For ``seconds``, due entries are not decided, locked and sent in one write: ``reason``.",
    ),
    "refused": Event(
        (WARNING, ERROR),
        "The server refuses a part of the one write for an entry, or for all: ``reason``; logged once until that "
        "changes. Beat tries the rest by itself. ERROR: the entry waits, because the broker answers and does not take "
        "its message, or because its own code fails. Logged again after about five minutes.",
    ),
    "clock_differs": Event(
        (WARNING,),
        "The clock of this ``host`` is ``ahead`` seconds ahead of the clock of the schedule's server, or behind if "
        "the number is negative.",
    ),
    "clock_agrees": Event((WARNING,), "The clock of this host agrees with the clock of the schedule's server again."),
    "clock_set_back": Event(
        (WARNING,),
        "The clock of the schedule's server was set back from ``before`` to ``now``, or the last leader had the "
        "clock of another server. Entries wait until ``before``, or count from now if that is more than three hours "
        "off.",
    ),
    "clock_caught_up": Event((WARNING,), "The clock has caught up, and entries do not wait for the clock any more."),
    "metrics_not_served": Event((ERROR,), "The metrics are not served: ``reason``, such as a port that is in use."),
    # Calls, messages and runs.
    "duplicate": Event(
        (INFO,),
        "A call was not sent, or a message was not run, because the task ``holder`` is queued or running.",
    ),
    "duplicate_refused": Event((INFO,), "A copy of a message that has run was dropped."),
    "replaced": Event((INFO,), "A message was dropped, because another call has taken its place (``cancel_other``)."),
    "not_replaced": Event(
        (WARNING,),
        "A call was sent and waits for its turn, because it could not take the places of others: ``reason``.",
    ),
    "not_terminated": Event(
        (WARNING,),
        "A call was sent and waits for its turn, because the run of ``holder`` could not be terminated: ``reason``.",
    ),
    "payload_unreadable": Event(
        (WARNING,),
        "A run has the arguments that its message has, because later ones in its lock cannot be read: ``reason``.",
    ),
    "postponed": Event(
        (INFO, WARNING),
        "A message was sent again to wait for its turn: ``countdown``, ``reason``. WARNING if its lock cannot be "
        "read: the message waits until you delete the value at the lock's key.",
    ),
    "unsent": Event(
        (WARNING,),
        "A message that has to wait for its turn cannot be sent again: ``reason``. If the message was acknowledged, "
        "the worker tries for a minute, and then the task fails. Or a call over Redis has reached no queue.",
    ),
    "unconfirmed": Event(
        (WARNING,),
        "An acknowledged message was sent again to wait for its turn, after an alarm of RabbitMQ had lasted for a "
        "minute. The message is lost if RabbitMQ dies before the alarm ends.",
    ),
    "not_taken": Event(
        (ERROR,),
        "The pool of a worker could not take a run: ``reason``. The lock is free, and the message stays with the "
        "broker, which delivers it again after the end of this worker.",
    ),
    "put_back": Event(
        (WARNING,),
        "A message cannot start for another ``reason``, and the broker will deliver the message again.",
    ),
    "result_not_stored": Event(
        (ERROR,),
        "The result backend did not store how a run ended, or that a run was skipped: ``reason``.",
    ),
    "ends_not_recorded": Event(
        (WARNING,),
        "The ends of runs could not be recorded, because of the schedule's server: ``reason``.",
    ),
    "check_in_open": Event((DEBUG,), "Sentry could not be told that a run was refused: ``reason``."),
    # Locks.
    "unlocked": Event(
        (WARNING, ERROR, INFO),
        "A call is sent, or a task runs, without a lock: ``reason``. ERROR if the lock of an entry cannot be read. "
        "INFO if the app of a worker has no server for locks.",
    ),
    "locked": Event(
        (WARNING,),
        "A worker with singlebeat was seen, so beat sends plain tasks with a lock from now on.",
    ),
    "lock_lost": Event(
        (WARNING,), "A run goes on or has ended without its lock, which ended before or which another holds."
    ),
    "lock_kept": Event(
        (WARNING, ERROR),
        "A lock could not be freed, and ends by itself. ERROR, with the traceback, if the cause is unexpected.",
    ),
    "renewer_failed": Event(
        (ERROR,),
        "The thread that renews locks met an unexpected error and goes on. The traceback follows.",
    ),
    "message_lost": Event((WARNING,), "Beat has freed a lock whose message is gone: ``reason``."),
    "in_doubt": Event(
        (WARNING,),
        "A lock has been queued for ten times ``singlebeat_lost_after``, and its message may be lost: ``reason``, and "
        "the command that frees the lock. Logged once in ten minutes for each queue, with one lock as an example.",
    ),
    "unread": Event(
        (WARNING,),
        "A message has waited for ten times ``singlebeat_lost_after`` in a queue that no worker reads, and its lock "
        "keeps runs from being sent: ``queue``, and ``reason``. Logged once in ten minutes for each queue, if all "
        "workers answer.",
    ),
    "ran_elsewhere": Event(
        (WARNING,),
        "Beat has freed the lock of a task that has ended, and whose worker did not free it: ``reason``.",
    ),
    "not_asked": Event((DEBUG,), "Lost messages are not searched for, because a server does not answer: ``reason``."),
    "search_failed": Event(
        (ERROR,),
        "The search for lost messages met an unexpected error and goes on. The traceback follows.",
    ),
}
