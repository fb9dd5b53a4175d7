"""The scheduler: each tick of the leader reads due entries, and claims, locks, sends and confirms their occurrences."""

from __future__ import annotations

import copy
import logging
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from redbeat import RedBeatScheduler

from .. import __version__, signals
from ..broker import own_broker
from ..config import Config
from ..connections import (
    RedisError,
    ResponseError,
    check_schedule_server,
    home_among_brokers,
    schedule_client,
    schedule_place,
)
from ..errors import ConfigError, ConflictError, EntryError, LockBackendError
from ..log import Log
from ..server_errors import denied_command, is_denied, with_advice
from .calendar.recurrence import reporting_questions
from .calendar.zone import app_zone
from .dispatch import Dispatcher
from .entries.entry import Entry as BeatEntry
from .entries.entry import prepare
from .entries.fields import BATCH, FencedError
from .entries.listing import Listing
from .entries.statics import Statics, are_same_but_paused, check_given, is_from_code, signature_of
from .failures import BROKER, UnreachableBrokerError
from .keys import Keys
from .leadership.clock_guard import Clock
from .leadership.lease import Lease, Term
from .leadership.service_manager import ServiceManager
from .leadership.watchdog import Watchdog, is_orphan
from .lost_messages import LostMessages
from .metrics import BeatMetrics
from .one_write import OneWrite
from .publisher import BeatProducer, BrokerAccess
from .server_time import ServerTime
from .status import APART
from .store.claims import Due, Store
from .store.probe import CONFIRM, TICKS, lock_server_says, schedule_error, schedule_refusal
from .store.spoilt import why_spoilt
from .store.unplaced import LostPlaces
from .store.zone_change import Places
from .tick import SHORTEST_SLEEP, Tick, next_delay

if TYPE_CHECKING:
    from celery import Celery

    from .entries.fields import Fence

__all__ = ("Scheduler",)

log = Log("celery.beat")

#: Longest sleep of the leader in seconds: within it, the leader notices a change that another program makes in Redis.
POLL_INTERVAL = 1.0

#: Seconds between two campaigns of a standby: how soon it takes over after a clean shutdown of the leader.
STANDBY_INTERVAL = 0.3

#: Seconds between two checks of a standby which beat leads: the leader may be a beat of another app by now.
LEADER_CHECK_INTERVAL = 5.0

#: Seconds after which a tick that failed is retried.
TROUBLE_INTERVAL = 1.0

#: Seconds after trouble until all pending occurrences are retaken.
RECHECK_AFTER = 2.0

#: Where leadership is switched off: seconds for which a beat keeps places that were computed in another zone. The beats
#: of that zone do the work, or have died.
ZONE_TURN = 60.0

#: Seconds between two tries to store the entries of ``beat_schedule`` that could not be stored.
LEFT_OUT_EVERY = 60.0

#: Seconds from which a tick is slow: it delays the entries that come due meanwhile.
SLOW_TICK = 10.0

#: How long operators see that the server has lost data, unless a program adds an entry before.
LOSS_NOTED_FOR = timedelta(days=1)

#: Signals that end a process at once if they have no handler: leadership would last until its lease ends.
ENDING = ("SIGHUP", "SIGQUIT")


def _handle_ending_signals() -> None:
    """Let the other signals end this beat as SIGTERM does, unless they have handlers of their own."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return
    for name in ENDING:
        number = getattr(signal, name, None)  # None on Windows
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


class Scheduler(BrokerAccess, RedBeatScheduler):  # type: ignore[misc]
    """Celery beat's scheduler on RedBeat's data: one beat leads, the others stand by, no occurrence is sent twice.

    Celery makes it: ``celery beat -S singlebeat.Scheduler``, or by its short name ``-S singlebeat``.

    Raises:
        ConfigError: a setting is wrong; the message names it.
    """

    Entry = BeatEntry
    max_interval = POLL_INTERVAL
    #: ``tick`` acquires leadership. Without a key, RedBeat's receiver of ``beat_init`` ignores this scheduler.
    lock_key = None

    def __init__(self, app: Celery, lock_timeout: float | None = None, lazy: bool = False, **kwargs: object) -> None:
        config = Config.of(app)
        prepare(app)
        app_zone(app)  # a wrong zone is an error at the start
        check_schedule_server(app)
        # Celery makes one instance just for the banner, and a beat may stand by for ever. So nothing is connected here,
        # and the entries are installed once this beat leads.
        kwargs = {"Producer": BeatProducer, **kwargs}
        super().__init__(app, lock_timeout=lock_timeout or config.redbeat_lock_timeout, lazy=True, **kwargs)
        self.lock_key = None
        self._gained: Term | None = None  #: our term, once it is logged
        self._checked: Term | None = None  #: our term, once the entries of other apps are counted
        self._term: Term | None = None  #: our term, once ``beat_schedule`` is installed
        self._stands_by_for, self._check_leader_at = "", 0.0  #: the leader at the last check, and when to check again
        self._spoilt = ""  #: why no beat can lead, once it is logged
        self._has_role = False
        self._in_trouble = set[str]()  #: kinds of errors that were logged since the trouble began
        self._is_refused = False  #: in the last tick that failed, the schedule's server replied with an error
        self._closed = self._ticking = self._ticked = False
        self._look_at = 0.0  #: monotonic: when this beat, as a standby, looks for a loss again
        self._lost_since: datetime | None = None  #: a loss that is not noted yet
        self._reinstalls = False  #: a loss is noted, and ``beat_schedule`` is to be installed again
        self._stored = set[str]()  #: the entries of ``beat_schedule`` that were stored
        self._left_out = dict[str, str]()  #: entries that could not be stored, and why
        self._left_out_over: Mapping[str, tuple[str, str]] = {}  #: what was stored of them then
        self._left_out_again_at = 0.0  #: monotonic: when to try again
        self._metrics: BeatMetrics | None = None
        self._recheck_at: float | None = None  #: when all pending occurrences are retaken, after trouble
        self._zone_turn_at = 0.0  #: from when on we may compute the places in our zone; 0: at once
        timeout = config.singlebeat_watchdog_timeout
        self._watchdog = Watchdog(timeout + _longest_call(config)) if timeout else None
        self._service_manager = ServiceManager.of_environment()
        self._lost_messages = LostMessages(app)

    @cached_property
    def lease(self) -> Lease:
        """Our leadership."""
        timeout = min(self.lock_timeout / 4, Config.of(self.app).singlebeat_socket_timeout)
        connect, keys = partial(schedule_client, self.app, timeout=timeout), Keys.of(self.app).lease
        about = {**signature_of(self.app), "version": __version__, "broker": own_broker(self.app)}
        if keys.lock is None:
            about["zone"] = str(app_zone(self.app))
        says = partial(schedule_error, self.app)
        return Lease(connect, keys, ttl=self.lock_timeout, about=about, server_time=self.server_time, says=says)

    @cached_property
    def server_time(self) -> ServerTime:
        """The time by which this beat decides."""
        return ServerTime()

    @cached_property
    def store(self) -> Store:
        """The entries in Redis."""
        return Store(self.app, schedule_client(self.app), progress=self._report_progress, server_time=self.server_time)

    @cached_property
    def clock(self) -> Clock:
        """The guard against clocks of leaders that were wrong."""
        return Clock(schedule_client(self.app), Keys.of(self.app), progress=self._report_progress)

    @cached_property
    def places(self) -> Places:
        """The places of the entries."""
        return Places(
            self.app,
            schedule_client(self.app),
            progress=self._report_progress,
            calculating_time=self.store.calculating_time,
        )

    @cached_property
    def lost_places(self) -> LostPlaces:
        """The guard against a loss of the places."""
        return LostPlaces(self.store.client, self.store.keys, progress=self._report_progress)

    @cached_property
    def statics(self) -> Statics:
        """The entries of ``beat_schedule``."""
        return Statics(self.app, schedule_client(self.app), self._fence)

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """The sender of claimed occurrences."""
        return Dispatcher(
            self.app,
            self.store,
            publisher=self,
            progress=self._report_progress,
            timestamp=self.server_time.timestamp,
            suspect=self._lost_messages.suspect,
        )

    @cached_property
    def work(self) -> Tick:
        """The work of each tick while this beat leads."""
        timestamp = self.server_time.timestamp
        one_write = OneWrite(self.app, self.store, self.dispatcher, self)
        return Tick(
            self.app, self.store, self.dispatcher, one_write, progress=self._report_progress, timestamp=timestamp
        )

    def may_publish(self, term: Term) -> bool:
        """Return whether this beat still leads in a term; another beat may have the next one."""
        return not self._closed and self.lease.term() == term

    @property
    def lock(self) -> Lease:
        """Our leadership, under RedBeat's name for it."""
        return self.lease

    @property
    def info(self) -> str:
        """The lines of Celery's banner about this scheduler."""
        key = Keys.of(self.app).lock
        lock = f"`{key}`, lease {self.lock_timeout:g} s" if key else "none: beats share the work"
        return f"       . redis -> {schedule_place(self.app)}\n       . lock -> {lock}"

    def tick(self, *args: object, **kwargs: object) -> float:
        """Send due occurrences if this beat leads; an error of a server is logged, and not raised.

        Returns:
            Seconds to sleep until the next tick.
        """
        if is_orphan():
            log.critical("beat: The worker's main process is gone: this beat ends", event="orphaned")
            self.close()
            raise SystemExit(1)
        if self._closed:
            raise SystemExit  # again: a library has swallowed the SystemExit of the signal's handler
        if not self._ticked:
            _handle_ending_signals()
            self._warn_of_settings()
        if self._metrics is None and not self._ticked:
            self._metrics = BeatMetrics.served(self.app, self.lease)
        self._ticking, self._ticked, began = True, True, time.monotonic()
        try:
            self._report_progress()
            # Once in the life of a beat; or, where no lease is renewed, before each tick: the clock may have been set.
            if not self.server_time.is_known or self.lease.keys.lock is None:
                self._ask_time()
            term = self.lease.acquire()
            with reporting_questions(self._report_progress):
                delay = self._stand_by() if term is None else self._tick(self.server_time.now(), term)
        except (RedisError, LockBackendError) as exc:
            self._is_refused = isinstance(exc, ResponseError)
            self._note_trouble(exc)
            return TROUBLE_INTERVAL
        except FencedError:  # its lease learns that soon
            return min(self.max_interval, POLL_INTERVAL)
        finally:
            self._ticking = False
            seconds = time.monotonic() - began
            signals.tick_ended.send(sender=self.app, seconds=seconds)
            if seconds > SLOW_TICK:
                log.warning("beat: A tick was slow", event="tick_ended", seconds=seconds)
        if self._in_trouble and self._is_recovered(term):
            of_broker = self._in_trouble == {UnreachableBrokerError.__name__}
            if not of_broker:
                log.warning("beat: Redis works again", event="recovered")
            elif not self.dispatcher.failures.is_away(BROKER):  # else its own line says when it answers
                log.warning("beat: Ticks succeed again", event="recovered")
            self._in_trouble.clear()
        return delay

    def _warn_of_settings(self) -> None:
        if self.app.conf.task_always_eager:
            text = "beat: task_always_eager is set, so that beat runs the tasks itself, and entries wait for them"
            log.warning(text, event="eager")
        with suppress(ConfigError):  # there are no locks, which is logged where one is needed
            if home := home_among_brokers(self.app):
                text = (
                    "beat: %(server)s is one of several brokers and keeps the schedule or locks: if it fails, workers "
                    "change to another broker and do not come back, and beat does. Set redbeat_redis_url and "
                    "singleton_backend_url to another server"
                )
                log.warning(text, event="several_brokers", server=home)

    def _is_recovered(self, term: Term | None) -> bool:
        """Return whether a successful tick ends the trouble: a server that refuses writes still allows reads."""
        if not self._is_refused:
            return True
        is_retried = term is None or self._recheck_at is None
        return is_retried and not schedule_refusal(self.app, needs=TICKS)

    def _fence(self) -> Fence | None:
        """Return what shows that this beat leads; None if it is not in a term, or leadership is switched off."""
        lock, term = self.store.keys.lock, self._gained if self._ticking else None
        return (lock, term.token) if lock and term is not None else None

    def _report_progress(self) -> None:
        # Only in a tick: a program that stores entries through a scheduler is no beat, and nothing would end its watch.
        if not self._ticking:
            return
        if self._watchdog is not None:
            self._watchdog.progress()
        if self._metrics is not None:
            self._metrics.progress()
        self._service_manager.progress()
        if self.lease.keys.lock is None and self.server_time.is_known:
            with suppress(RedisError):  # the tick itself finds that out
                self.lease.give_sign()

    def _ask_time(self) -> None:
        self.server_time.ask(schedule_client(self.app), Keys.of(self.app).schedule)

    def _tick(self, now: datetime, term: Term) -> float:
        if self._in_trouble and self._is_refused and schedule_refusal(self.app, needs=CONFIRM):
            # The trouble is logged. An occurrence that is sent and cannot be confirmed would be sent again.
            self._recheck_at = time.monotonic() + RECHECK_AFTER
            return TROUBLE_INTERVAL
        is_new = term != self._term
        if is_new:
            self._lead(term)
        self._lost_messages.poll()
        self._restore_lost_changes(self.clock.check(now, term))
        self._install_left_out()
        due, interval = self._read_due(now, term, is_new=is_new), min(self.max_interval, POLL_INTERVAL)
        if self._restore_lost_changes(self.store.last_records.take_loss()):
            return SHORTEST_SLEEP
        self.lost_places.check(due.witnesses)
        is_searching = self.lost_places.search()  # the next tick reads what it has found
        if not term.token and due.zone not in {None, str(app_zone(self.app))}:
            return interval  # beats of that zone do the work: each of our claims would be refused
        scores = self.work.work_off(due, term, now, self.clock.jump)
        if due.statics_gone and self._stored:
            if self.statics.are_gone(self._stored):  # else another program has removed that key alone
                self._note_loss("beat_schedule was installed, and is gone")
                self.lease.forget()
            self.setup_schedule()
            return SHORTEST_SLEEP
        if is_searching:
            return SHORTEST_SLEEP
        return next_delay(due, scores, self.server_time.timestamp(), longest=interval)

    def _restore_lost_changes(self, since: datetime | None) -> bool:
        """Note that the server has lost its changes since a moment, and install ``beat_schedule`` again.

        Args:
            since: None: no loss was found now. One that was found before is restored, if an error kept that from it.
        """
        self._lost_since = since or self._lost_since
        if self._lost_since is not None:
            self._note_loss(_lost_records(self._lost_since))
            self.lease.forget()
            self._lost_since, self._reinstalls = None, True
        if not self._reinstalls:
            return False
        self.setup_schedule()
        self._reinstalls = False
        return True

    def _read_due(self, now: datetime, term: Term, *, is_new: bool) -> Due:
        """Read due entries and pending occurrences, in places that were computed in this app's zone.

        Args:
            is_new: the term begins, so all pending occurrences that the earlier leader has left are retaken.
        """
        wants_all = is_new
        if self._recheck_at is not None:
            wants_all = time.monotonic() >= self._recheck_at
            self._recheck_at = None if wants_all else self._recheck_at
        due, zone = self.work.read(now, self.lease.share, all_pending=wants_all), str(app_zone(self.app))
        # Where beats share the work, no number of a term is lost; the time zone is stored from the first tick on.
        if not (is_new or term.token or due.zone or self._stored) and self._is_emptied():
            self._note_loss("the server has lost all its data")
        if due.zone != zone and (term.token or not due.zone or time.monotonic() >= self._zone_turn_at):
            self.places.renew(due.zone, now, term)
            due = self.work.read(now, self.lease.share, all_pending=wants_all)
        if due.zone == zone:
            self._zone_turn_at = time.monotonic() + ZONE_TURN
        return due

    def _is_emptied(self) -> bool:
        """Return whether there is no place of any entry, or no time at which any beat has decided."""
        keys = self.store.keys
        return bool(self.store.client.exists(keys.schedule, keys.clock) < 2)

    def _lead(self, term: Term) -> None:
        """Begin a term; after an error it is called again, and repeats no log line."""
        if term != self._gained:
            self._end_term()  # the earlier term is over, even if no other beat has led since
            if term.token:
                facts: dict[str, object] = {"term": term.number, "leader": term.leader}
                if term.expired:
                    why = "it has died, hangs, or did not reach the schedule's server"
                    facts["reason"] = f"{self._stands_by_for} did not renew the lock for {self.lock_timeout:g} s: {why}"
                self._log_change("beat: Acquired lock: this beat leads", event="leadership_gained", **facts)
            if term.lost:
                self._note_loss(_forgotten(term.lost))
            self._gained = term
        self._report_progress()
        if term != self._checked:
            self._check_others()
            self.store.check_eviction()
            self._checked = term
        self.lost_places.begin()
        self.lost_places.search()
        self.setup_schedule()
        self._term, self._stands_by_for, self._spoilt, self._check_leader_at = term, "", "", 0.0
        signals.leadership_gained.send(sender=self.app, term=term)

    def _check_others(self) -> None:
        for other, names in self.statics.of_others().items():
            text = (
                "beat: This beat of app %(app)s leads over %(entries)d entries of app %(other)s, and sends them to its "
                "own queues"
            )
            self._report_other_app(text, other, entries=len(names))
        self._report_progress()

    def _note_loss(self, why: str) -> None:
        """Log that the server has lost data, and note it for operators; of several losses, the first one counts.

        What the server has restored may hold the note of an earlier loss: it is shown until a day after the last one.
        """
        if not self._set_loss(why):
            self.store.client.pexpire(self.store.keys.lost, LOSS_NOTED_FOR)
        self.store.last_records.forget()
        self.clock.forget()
        sentence = "beat: The schedule has vanished, or its last changes: installing beat_schedule again"
        log.warning(sentence, event="schedule_vanished", reason=why)

    def _note_earlier_loss(self, why: str) -> None:
        """Log and note a loss before the present term, unless the leader has noted it: it may have known more."""
        if why and self._set_loss(why):
            sentence = "beat: The schedule has vanished, or its last changes, as this standby has noticed"
            log.warning(sentence, event="schedule_vanished", reason=why)

    def _set_loss(self, why: str) -> bool:
        note = f"{self.server_time.now().isoformat(timespec='seconds')} {why}"
        return bool(self.store.client.set(self.store.keys.lost, note, nx=True, ex=LOSS_NOTED_FOR))

    def _end_term(self) -> None:
        gained, began = self._gained, self._term
        self._gained = self._checked = self._term = None
        self._reinstalls = False  # the next leader installs it
        if gained is not None:
            log.warning("beat: Lost the lock: a term is over", event="leadership_lost", term=gained.number)
        if began is not None:
            signals.leadership_lost.send(sender=self.app, term=began, reason="lost")

    def _stand_by(self) -> float:
        """Note that another beat leads; return the seconds until the next campaign."""
        self._end_term()
        if time.monotonic() >= self._look_at and not self._closed:
            self._look_at = time.monotonic() + POLL_INTERVAL
            lost_since, self._lost_since = self.store.last_records.look() or self._lost_since, None
            self._note_earlier_loss(_lost_records(lost_since) if lost_since is not None else "")
        if time.monotonic() >= self._check_leader_at and not self._closed:
            self._check_leader_at = time.monotonic() + LEADER_CHECK_INTERVAL
            self.dispatcher.note_workers()
            leader, spoilt = self.lease.leader(), self.lease.spoilt
            self._note_earlier_loss(_forgotten(self.lease.forgotten) if self.lease.forgotten else "")
            name = self._stands_by_for if leader and self._stands_by_for else "another beat"
            if "host" in leader:
                name = f"{leader['host']}:{leader['pid']}"
            if spoilt and spoilt != self._spoilt:
                log.error("beat: Standing by, and no beat leads", event="leaderless", reason=spoilt)
            self._spoilt = spoilt
            if name != self._stands_by_for and not spoilt:
                self._stands_by_for = name
                facts = {"term": leader.get("term"), "since": leader.get("since")}
                self._log_change("beat: Standing by: %(leader)s leads", event="stands_by", leader=name, **facts)
                if (other := leader.get("app")) and other != self.statics.owner:
                    text = "beat: This beat of app %(app)s stands by for a beat of app %(other)s"
                    self._report_other_app(text, other)
        return STANDBY_INTERVAL * random.uniform(0.8, 1.2)  # noqa: S311 - so that standbys do not campaign in step

    def _report_other_app(self, text: str, other: str, **pairs: object) -> None:
        """Log that this beat shares its schedule with another app.

        Raises:
            ConfigError: ``singlebeat_other_app_check`` forbids it.
        """
        config, facts = Config.of(self.app), {"app": self.statics.owner, "other": other, **pairs}
        why = (
            f"both have redbeat_key_prefix {config.redbeat_key_prefix!r} in one database: {APART}. Or set "
            "singlebeat_other_app_check to ignore if they share the schedule on purpose"
        )
        if config.singlebeat_other_app_check == "raise":
            self.close()
            raise ConfigError(f"{(text % facts).removeprefix('beat: ')}: {why}")
        if config.singlebeat_other_app_check == "warn":
            log.warning(text, event="other_app", **facts, reason=why)

    def _log_change(self, text: str, *, event: str, **pairs: object) -> None:
        """Log which beat leads: at level INFO the first time, at WARNING for each later change."""
        log.write(logging.WARNING if self._has_role else logging.INFO, text, event=event, **pairs)
        self._has_role = True

    def _note_trouble(self, exc: RedisError | LockBackendError) -> None:
        # Claimed occurrences may be unsent. They are retaken later, so that workers first record the runs of meanwhile.
        self._recheck_at = time.monotonic() + RECHECK_AFTER
        kind = type(exc).__name__  # the words of an error change from try to try
        if kind in self._in_trouble:
            return
        self._in_trouble.add(kind)
        if isinstance(exc, LockBackendError):
            text = lock_server_says(self.app, exc)
        elif isinstance(exc, UnreachableBrokerError):  # it names the server
            text = with_advice(exc)
        else:
            text = schedule_error(self.app, exc)
        # Redis before 7.2 does not name the command of a script.
        is_unnamed = isinstance(exc, ResponseError) and is_denied(exc) and not denied_command(str(exc))
        if is_unnamed and (refused := schedule_refusal(self.app, needs=TICKS)):
            text = f"the schedule's server {schedule_place(self.app)}: {refused}"
        if why := why_spoilt(schedule_client(self.app), Keys.of(self.app), exc):
            text = f"the schedule's server {schedule_place(self.app)}: {why}"
        what = BROKER if isinstance(exc, UnreachableBrokerError) else "Redis"
        sentence = f"beat: Trouble with {what}: trying again"
        log.error(sentence, event="trouble", every=TROUBLE_INTERVAL, reason=text)

    def setup_schedule(self) -> None:
        """Install the entries of ``beat_schedule``; called each time this beat begins to lead."""
        entries = {name: given for name, given in self.app.conf.beat_schedule.items() if self._is_static(name, given)}
        self.install_default_entries(entries)
        self._left_out.clear()
        self._left_out_again_at = time.monotonic() + LEFT_OUT_EVERY
        stored = self._install(entries, owns=True)
        self.statics.keep([str(name) for name in entries], stored)
        self._stored = {*stored}
        self._left_out_over = self.statics.stored(self._left_out)

    def _install_left_out(self) -> None:
        """Try again to store the entries of ``beat_schedule`` that could not be: what hindered them may be over."""
        if not self._left_out or time.monotonic() < self._left_out_again_at:
            return
        self._left_out_again_at = time.monotonic() + LEFT_OUT_EVERY
        entries = {str(name): given for name, given in self.app.conf.beat_schedule.items() if is_from_code(given)}
        found, before = self.statics.stored([name for name in entries if name in self._left_out]), self._left_out_over
        # One that was added, edited or removed since then stays as it is until the next term.
        same = {name: now for name, now in found.items() if name in before and are_same_but_paused(now, before[name])}
        self._left_out = {name: why for name, why in self._left_out.items() if name in same}
        stored = self._install({name: entries[name] for name in same}, owns=True, over=same)
        if stored:
            self.statics.keep(entries, stored)
            self._stored |= {*stored}
        for name in stored:
            del self._left_out[name]
            log.warning("beat: '%(entry)s' is stored now", event="added", entry=name)

    def _maybe_entry(self, name: str, given: object) -> BeatEntry:
        check_given(name, given)
        entry: BeatEntry = super()._maybe_entry(name, given)
        return entry

    def _is_static(self, name: str, given: object) -> bool:
        if is_from_code(given):
            return True
        why = "a tool that lists entries has added it to beat_schedule: it stays as it is stored"
        log.warning("beat: '%(entry)s' does not come from the code", event="not_added", entry=name, reason=why)
        return False

    def update_from_dict(self, dict_: Mapping[str, object]) -> list[str]:
        """Store entries that are given like those of ``beat_schedule``; return the names of the stored ones."""
        return self._install(dict_, owns=False)

    def _install(
        self, dict_: Mapping[str, object], *, owns: bool, over: Mapping[str, tuple[str, str]] | None = None
    ) -> list[str]:
        entries, now = dict[str, BeatEntry](), self.server_time.now()
        for name, given in dict_.items():
            self._report_progress()
            try:
                entries[str(name)] = copy.copy(self._maybe_entry(name, given))
            except Exception as exc:  # one wrong entry must not keep the others out
                self._leave_out(str(name), exc)
        stored, left = list[str](), iter(entries.items())
        while batch := dict(islice(left, BATCH)):  # 100,000 entries take longer than the watchdog waits
            self._report_progress()
            for name, problem in self.statics.install(batch, now, owns=owns, over=over).items():
                if problem is None:
                    stored.append(name)
                elif not (over and isinstance(problem, ConflictError)):  # the next try learns that it was edited
                    self._leave_out(name, problem)
        self._report_progress()
        return stored

    def _leave_out(self, name: str, exc: Exception) -> None:
        """Log why an entry is not stored, unless it was logged before, and have it tried again."""
        before, self._left_out[name] = self._left_out.get(name), str(exc)
        if before == str(exc):
            return
        text = "beat: Cannot add entry '%(entry)s' to the schedule"
        if isinstance(exc, EntryError):  # its sentence says all
            log.error(text, event="not_added", entry=name, reason=exc)
        else:
            log.exception(text, event="not_added", entry=name)

    def add(self, **kwargs: Any) -> BeatEntry:
        """Store one entry."""
        return BeatEntry(app=self.app, **kwargs).save()

    @property
    def schedule(self) -> Mapping[str, BeatEntry]:
        """All entries by name, for tools that list them; each use reads Redis again. RedBeat's has only due entries."""
        return Listing(self.app, self.store.client, self._configured)

    def get_schedule(self) -> Mapping[str, BeatEntry]:
        """Return the same, under Celery's other name."""
        return self.schedule

    def _configured(self, name: str) -> BeatEntry | None:
        given = self.app.conf.beat_schedule.get(name)
        try:
            return None if given is None else copy.copy(self._maybe_entry(name, given))
        except Exception:  # a wrong entry is logged when it is installed
            return None

    def close(self) -> None:
        """Give up leadership and the broker connection; may run in a signal handler during a tick, and repeatedly."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.stop()
        self._service_manager.stop()
        self._lost_messages.stop()
        if "lease" in self.__dict__:
            self.lease.release()
        if not self._ticking:  # else the connection may be in use: close() is called again when the tick has ended
            BrokerAccess.close(self)


def _longest_call(config: Config) -> float:
    """Return the seconds for which one call to a server may be repeated, beside its timeouts."""
    periods = [
        options.get("retry_period") for options in (config.redbeat_redis_options, config.singleton_backend_kwargs)
    ]
    with suppress(TypeError, ValueError):  # the client raises for such an option
        return max(0.0, *(float(period or 0) for period in periods))
    return 0.0


def _lost_records(since: datetime) -> str:
    """Return how a server has lost its last changes, in words.

    Args:
        since: the time of the last change that is left, or of one shortly before.
    """
    return (
        f"the changes since {since.isoformat(timespec='seconds')}, or shortly before, are lost: Redis has started from "
        "a snapshot, or another server has taken over"
    )


def _forgotten(term: int) -> str:
    """Return how a server that has forgotten a term has lost data, in words."""
    return (
        f"the server has forgotten term {term}: it has lost all its data, or its last changes, as a server does that "
        "starts from an old snapshot"
    )
