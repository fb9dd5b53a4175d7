"""Renews and frees the locks of a worker's requests, in one thread of the worker's main process."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary

from celery.worker.state import revoked, revoked_stamps

from .. import signals
from ..broker import own_broker
from ..config import Config
from ..errors import LockBackendError, UnusableLockError
from ..locks import new_backend
from ..locks.acquire import note_of_broker
from ..locks.base import RENEWALS_PER_LEASE, BaseBackend, Ref, Renewal, Ticket, entry_of
from ..log import Log
from ..native_threads import Empty, SimpleQueue, await_native, do_in_loop, native_sleep, start_native_thread
from ..server_errors import is_denied, is_key_denied

if TYPE_CHECKING:
    from celery import Celery
    from kombu.asynchronous.timer import Timer

    from .request import Request

__all__ = ("Renewer", "has_renewer", "renewer_of")

log = Log(__name__)

#: Seconds for which a worker with singlebeat counts as seen; long, because locks matter most while workers are down: a
#: staging system may have none over the holidays, though beat goes on.
ANNOUNCED_FOR = 30 * 24 * 3600.0

#: Seconds without a question about locks of plain tasks after the locks' server failed, in the main process or a child.
#: So an outage cannot stall the worker.
GATE_PAUSE = 10.0

#: Seconds after which a call that failed is repeated.
RETRY_AFTER = 0.5

#: Seconds between two checks of the messages that wait in this worker: which were revoked, and which have come.
CHECKED_AFTER = 1.0

#: Maximum number of ends of runs that are remembered while the server is unreachable.
MOST_ENDS = 10_000

#: Seconds after which an end is sent again whose key is denied to this user, and the maximum number of such ends: the
#: keys of some tasks may be denied for good.
DENIED_PAUSE, MOST_DENIED = 10.0, 500

#: Seconds for which ends of runs are collected; the process that ran them has freed most of their locks already.
GATHERING = 0.02

#: Seconds between two looks whether the thread has begun a run.
POLL = 0.01

#: Seconds that a worker which shuts down waits for its last locks to be freed.
FLUSH_TIMEOUT = 5.0


class _End(NamedTuple):
    """The end of a message, whose locks are to be freed."""

    due: float  #: when its locks are to be freed, in seconds of the monotonic clock
    ticket: Ticket
    ran: bool = False  #: its run is over, and is remembered
    took: bool = False  #: the main process knows that the run had taken its lock
    task: str = ""  #: the name of its task if a loss of the lock is to be logged; else empty
    unsent: bool = False  #: what follows the run may be unsent


class _Handover(NamedTuple):
    """A lock that goes over from a run to the next delivery of its message."""

    run: Ref
    successor: Ref
    ttl: float  #: seconds that the message may wait for its start


class Renewer:
    """The thread that renews the locks of all requests of this worker: every third of a lease, by one script.

    The set of requests is weak. When a request is gone for any reason, its renewal stops, and its lock ends with the
    lease. The same thread frees locks. The worker's event loop itself asks Redis only to begin plain tasks, to
    requeue and to retire.
    """

    def __init__(self, app: Celery) -> None:
        config = Config.of(app)
        self.lease, self.remember_for = config.singlebeat_lock_lease, config.singlebeat_queued_ttl
        #: Name under which the renewer announces its worker; empty if it does not.
        self.name = f"{os.uname().nodename}:{os.getpid()}"
        self._note = note_of_broker(own_broker(app))
        self.backend = new_backend(app, own_connections=True)
        self._gate = new_backend(app, own_connections=True)
        self._requests: WeakValueDictionary[int, Request] = WeakValueDictionary()
        self._new: deque[tuple[float, ReferenceType[Request]]] = deque()  #: since when each is here (monotonic, in s)
        self._finished: SimpleQueue[_End] = SimpleQueue()
        self._handovers: SimpleQueue[_Handover] = SimpleQueue()
        self._wake: SimpleQueue[SimpleQueue[None] | None] = SimpleQueue()
        self._later: list[_End] = []
        self._left_out: list[_End] = []  #: the key of their locks was denied to this user
        self._gate_closed_until = 0.0
        self._denied = set[str]()  #: the keys of locks that the server denies to this user, once that is logged
        self._beginning: Request | None = None  #: the request that the thread may be about to begin
        self._started = self._is_retired = False
        self._is_unannounced = False  #: it may not announce itself, or another program has spoilt the key
        self.timer: Timer = None  #: of the worker's event loop, where messages may be acknowledged; None without worker
        self.failing = False  #: whether the locks' server is unreachable or refuses, and no retry has succeeded yet

    def start(self) -> None:
        """Start the thread unless it runs; it is native even if gevent or eventlet have patched threads."""
        if not self._started:
            self._started = True
            start_native_thread(self._run, "singlebeat-renewer")

    def serve(self, worker: str, *, name: str) -> None:
        """Start for a worker: write its name into the locks that it renews, and announce the worker until it stops."""
        self.backend.worker, self.name, self._is_retired = worker, name, False
        self.start()

    def retire(self) -> None:
        """Announce that the worker takes no more messages; still renew the locks of its running tasks."""
        self._is_retired = True
        if self.name and self.answers():
            try:
                self.gate.retire(self.name)
            except LockBackendError:
                self.note_failure()

    def track(self, request: Request) -> None:
        """Renew the lock of a request from now on."""
        self._requests[id(request)] = request
        self._new.append((time.monotonic(), weakref.ref(request)))
        self.start()

    def forget(self, request: Request) -> None:
        """Stop the renewal of a request's locks, but do not free them."""
        self._requests.pop(id(request), None)

    def forget_waiting(self) -> None:
        """Stop the renewal for the messages that wait in this worker: the broker has them again, or has lost them."""
        for request in self._living():
            if request.waits_here:
                self.forget(request)

    def finish(self, request: Request, *, after: float = 0.0) -> None:
        """Free the locks of a request that is over, after a delay in seconds if its body may still be running."""
        self._requests.pop(id(request), None)
        if request.ticket is not None:
            task = request.name if request.tells_loss(is_over=True) else ""
            due, took = time.monotonic() + after, request.has_begun
            self._put_end(_End(due, request.ticket, request.has_run, took, task, request.leaves_unsent))

    def tell_end(self, ticket: Ticket, *, unsent: bool) -> None:
        """Free the lock of a run that has ended, before its message is acknowledged.

        Args:
            unsent: what follows the run is sent from now on.
        """
        self._put_end(_End(time.monotonic(), ticket, ran=True, unsent=unsent))

    def finish_ticket(self, ticket: Ticket) -> None:
        """Free the locks of a message that does not become a request."""
        self._put_end(_End(time.monotonic(), ticket))

    def _put_end(self, end: _End) -> None:
        self._finished.put(end)
        self._wake.put(None)

    def hand_over(self, request: Request, successor: Ref, *, ttl: float, at_once: bool = False) -> None:
        """Hand the lock of a request over to the next delivery of its message.

        Args:
            ttl: seconds that the message may wait for its start.
            at_once: hand over before this method returns, unless the locks' server does not answer.
        """
        self._requests.pop(id(request), None)
        if request.ticket is None:
            return
        handover = _Handover(request.ticket.run, successor, ttl)
        if at_once and self.answers():
            self._await_begin(request)
            try:
                self._rotate(self._gate, handover)
            except LockBackendError:
                self.note_failure()
            else:
                return
        if self._handovers.qsize() < MOST_ENDS:
            self._handovers.put(handover)
            self._wake.put(None)

    def leave(self, request: Request) -> None:
        """Leave the lock of a request that never runs to its next delivery for a lease, if the broker makes one."""
        self._requests.pop(id(request), None)
        if request.ticket is not None:
            next_one = replace(request.ticket.run, nonce="")
            for held in (request.ticket.run, next_one):  # the lock of its run, or of its message
                self._handovers.put(_Handover(held, next_one, self.lease))
            self._wake.put(None)

    def call_later(self, seconds: float, do: Callable[[], None]) -> None:
        """Call a function in the worker's event loop after some seconds; at once if there is no worker."""
        if self.timer is None:
            do()
        else:
            self.timer.call_after(seconds, do)

    def held(self) -> Mapping[str, int]:
        """Return how many requests with a lock this worker has, by their state: ``queued`` or ``running``."""
        states = Counter({"queued": 0, "running": 0})
        states.update("queued" if request.time_start is None else "running" for request in self._living())
        return states

    @property
    def gate(self) -> BaseBackend:
        """The lock backend of the worker's event loop.

        Raises:
            LockBackendError: the locks' server did not answer a moment ago, so it is not asked now.
        """
        if not self.answers():
            raise LockBackendError("a moment ago the locks' server did not answer, or refused")
        return self._gate

    def answers(self) -> bool:
        """Return whether the event loop may ask the locks' server, because no failure was noted a moment ago."""
        return time.monotonic() >= self._gate_closed_until

    def note_failure(self) -> None:
        """Note that the locks' server failed; until it works again, only the thread asks it."""
        self._gate_closed_until = time.monotonic() + GATE_PAUSE
        self._wake.put(None)

    def flush(self) -> None:
        """Wait for a few seconds at most until the locks of ended requests are free."""
        if self._started:
            done: SimpleQueue[None] = SimpleQueue()
            self._wake.put(done)
            if not await_native(done, timeout=FLUSH_TIMEOUT):
                log.warning("the worker ends before its last locks are free: they end by themselves", event="lock_kept")

    def _run(self) -> None:
        due, renewed = 0.0, False
        while True:
            # Not only if there are requests: a wake-up for each that comes would slow down the event loop.
            soon = [due, time.monotonic() + CHECKED_AFTER, *(end.due for end in self._later)]
            waiting = self._wait(max(0.0, min(soon) - time.monotonic()))
            try:
                # Renew first: a server may refuse to free locks or to hand them over, but still renew them. Then
                # ``due`` lies ahead, also if the rest of the round fails.
                waits = self._waiting_anew()
                if time.monotonic() >= due or not self.answers():
                    due = time.monotonic() + self.lease / RENEWALS_PER_LEASE
                    self._renew(self._living())
                    self._announce()
                    self._gate_closed_until = 0.0
                    renewed = True
                elif waits:
                    self._renew(waits)
                self._free_revoked()
                self._work_off()
                # After a refusal, ends of runs are still to be sent.
                if self.failing and renewed and not self._later:
                    self.failing = False
                    log.warning("locks are renewed and freed again", event="recovered")
            except LockBackendError as exc:
                renewed = False
                due = min(due, time.monotonic() + RETRY_AFTER)
                if not self.failing:
                    log.warning("locks that are not renewed end by themselves", event="not_renewed", reason=exc)
                self.failing = True
            except Exception:  # the outer edge of the thread: it must live as long as its worker
                log.exception("the renewer of locks failed and goes on", event="renewer_failed")
            for done in waiting:
                done.put(None)

    def _wait(self, timeout: float) -> list[SimpleQueue[None]]:
        """Wait for work, and a little longer for more work; return the queues of the callers that wait for its end."""
        news: list[SimpleQueue[None] | None] = []
        with suppress(Empty):
            news.append(self._wake.get(timeout=timeout))
            if news == [None]:
                native_sleep(GATHERING)  # collect, because a wake-up for each end would slow down the event loop
            while True:
                news.append(self._wake.get_nowait())
        return [done for done in news if done]

    def _work_off(self) -> None:
        while not self._handovers.empty():
            handover = self._handovers.get_nowait()
            try:
                self._in_parts([handover.run], partial(self._rotate_one, handover))
            except LockBackendError:
                self._handovers.put(handover)
                raise
        while not self._finished.empty():
            self._later.append(self._finished.get_nowait())
        now = time.monotonic()
        over = [end for end in (*self._later, *self._left_out) if end.due <= now]
        later = [end for end in self._later if end.due > now]
        self._left_out = [end for end in self._left_out if end.due > now]
        # Keep the ends until the server has accepted them: it may be unreachable at this moment.
        self._later = later + [end._replace(due=now + RETRY_AFTER) for end in over][-MOST_ENDS:]
        lost = set[Ref]()

        def finish(refs: Sequence[Ref], **how: bool) -> None:
            lost.update(self.backend.finish_many(refs, remember_for=self.remember_for, **how))

        denied = set[Ref]()
        alike = dict[tuple[bool, bool, bool], list[Ref]]()
        for end in over:
            alike.setdefault((end.ran, end.ran and end.took, end.unsent), []).append(end.ticket.run)
        for (ran, took, unsent), refs in alike.items():
            denied |= self._in_parts(refs, partial(finish, ran=ran, took=took, unsent=unsent))
        denied |= self._in_parts([ref for end in over for ref in end.ticket.refs[1:]], finish)
        self._later = later
        again = [end._replace(due=now + DENIED_PAUSE) for end in over if not denied.isdisjoint(end.ticket.refs)]
        self._left_out = [*self._left_out, *again][-MOST_DENIED:]
        for end in over:
            if end.task and end.ticket.run in lost:
                said = "%(task)s[%(id)s] has ended without its lock: it was lost before"
                self._report_loss(end.task, end.ticket.run, said)

    def _rotate_one(self, handover: _Handover, _: Sequence[Ref]) -> None:
        self._rotate(self.backend, handover)

    def _rotate(self, backend: BaseBackend, handover: _Handover) -> None:
        run, successor, ttl = handover
        backend.rotate(run, to=successor, ttl=ttl, remember_for=self.remember_for)

    def _free_revoked(self) -> None:
        """Free the locks of messages that were revoked while they wait in this worker, for an ETA or a retry."""
        if revoked or revoked_stamps:
            for request in self._living():
                if request.ticket is not None and request.give_up_if_revoked():
                    self._finished.put(_End(time.monotonic(), request.ticket))

    def _announce(self) -> None:
        try:
            if self.name and self._is_retired:  # it has messages that it gives back only when its last tasks have ended
                self.backend.retire(self.name)
            elif self.name:
                self.backend.announce(self.name, ttl=ANNOUNCED_FOR)
        except LockBackendError as exc:
            if not (is_denied(exc) or isinstance(exc, UnusableLockError)):
                raise
            if not self._is_unannounced:  # locks are renewed all the same
                text = "this worker is not announced: others may take it for one without singlebeat"
                log.warning(text, event="not_announced", reason=exc)
            self._is_unannounced = True
        else:
            if self._is_unannounced:
                log.warning("this worker is announced again", event="recovered")
            self._is_unannounced = False

    def _living(self) -> list[Request]:
        # valuerefs() copies in one step: requests come and go in other threads meanwhile.
        return [request for weak in self._requests.valuerefs() if (request := weak()) is not None]

    def _waiting_anew(self) -> list[Request]:
        """Return the requests that have come since the last call, and still wait here after a moment.

        Without a renewal, the search for lost messages would take those that a rate limit holds back for lost: Celery
        keeps them where no question to the worker finds them.
        """
        found: list[Request] = []
        while self._new and self._new[0][0] <= time.monotonic() - CHECKED_AFTER:
            request = self._new.popleft()[1]()
            if request is not None and id(request) in self._requests and request.time_start is None:
                found.append(request)
        return found

    def _in_parts(self, refs: Sequence[Ref], do: Callable[[Sequence[Ref]], object]) -> set[Ref]:
        """Do something with many locks at once, but leave out and return those whose keys are denied to this user.

        The server refuses a call with such a key as a whole. The key of one message must not harm the locks of others.

        Raises:
            LockBackendError: as ``do``, unless a key is denied.
        """
        try:
            do(refs)
        except LockBackendError as exc:
            if not is_key_denied(exc):
                raise
            if len(refs) > 1:
                half = len(refs) // 2
                return self._in_parts(refs[:half], do) | self._in_parts(refs[half:], do)
            if refs[0].key not in self._denied:
                self._denied.add(refs[0].key)
                log.warning(
                    "a lock is not renewed, and ends by itself", event="not_renewed", id=refs[0].task_id, reason=exc
                )
            return {refs[0]}
        self._denied.difference_update(ref.key for ref in refs)
        return set()

    def _renew(self, requests: Sequence[Request]) -> None:
        renewals = dict[Ref, Renewal]()

        def renew(refs: Sequence[Ref], *, lease: float) -> None:
            renewals.update(zip(refs, self.backend.renew_many(refs, lease=lease), strict=True))

        begun = {id(request) for request in requests if request.has_begun}  # the others may begin after the answer
        held = [(request, ref) for request in requests for ref in request.renewed()]
        self._in_parts([ref for _, ref in held], partial(renew, lease=self.lease))
        shown = [(request, ref) for request in requests for ref in request.shown_alive()]
        self._in_parts([ref for _, ref in shown], partial(renew, lease=0))
        for request, ref in held + shown:
            renewal = renewals.get(ref)
            if request.ticket is None or ref.key != request.ticket.key:
                continue  # the lock of a message in the queue ends with its start
            if renewal is Renewal.QUEUED and request.time_start is not None:
                self._begin(request, ref)  # the run started while the server was unreachable
            elif renewal is Renewal.RUNNING:
                request.has_begun = True
            elif renewal is Renewal.OVER:
                self._requests.pop(id(request), None)
            elif renewal is Renewal.LOST and id(request) in begun and request.tells_loss(is_over=False):
                self._requests.pop(id(request), None)
                self._report_loss(
                    request.name, ref, "%(task)s[%(id)s] runs on without its lock, or has just ended: it was lost"
                )

    def _report_loss(self, task: str, ref: Ref, said: str) -> None:
        log.warning(said, event="lock_lost", task=task, id=ref.task_id)
        do_in_loop(partial(signals.lock_lost.send, sender=task, ref=ref))

    def _begin(self, request: Request, ref: Ref) -> None:
        """Let a run that has started take its lock, unless it has ended or been handed over since it was listed."""
        queued = request.ticket.queued if request.ticket else ""
        about = {"task": request.name, "arguments": request.shown, "entry": entry_of(request.request_dict)}
        about["note"] = self._note
        self._beginning = request  # before the check, as the other thread first takes the request off the list
        try:
            if id(request) in self._requests:
                with suppress(UnusableLockError):  # logged by the process that started the run
                    self.backend.begin(ref, queued=queued, lease=self.lease, remember_for=self.remember_for, **about)
        finally:
            self._beginning = None

    def _await_begin(self, request: Request) -> None:
        """Wait until the thread does not begin a request, which the caller has taken off the list."""
        given_up = time.monotonic() + FLUSH_TIMEOUT
        while self._beginning is request and time.monotonic() < given_up:
            time.sleep(POLL)


_renewers: WeakKeyDictionary[Celery, tuple[int, Renewer]] = WeakKeyDictionary()


def renewer_of(app: Celery) -> Renewer:
    """Return the renewer of an app in this process; a forked child gets its own renewer."""
    pid, renewer = _renewers.get(app, (0, None))
    if renewer is None or pid != os.getpid():
        renewer = Renewer(app)
        _renewers[app] = os.getpid(), renewer
    return renewer


def has_renewer(app: Celery) -> bool:
    """Return whether this process has the renewer of an app: a worker's main process has, its children have not."""
    return _renewers.get(app, (0, None))[0] == os.getpid()
