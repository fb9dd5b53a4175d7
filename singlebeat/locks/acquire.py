"""Which lock a call takes before it is sent, and what becomes of a call that does not get it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kombu.utils.encoding import safe_repr

from ..config import Config
from ..errors import ConfigError, LockBackendError, UnusableLockError
from ..log import Log
from .base import (
    RUN_HEADER,
    BaseBackend,
    Call,
    Holder,
    IfHeld,
    Ref,
    Ticket,
    Verdict,
    entry_of,
    generation,
    unusable,
)
from .key import behind_key, beside, readable, suspects_key
from .late_release import cancel_release, refused, release_later
from .modes import LockMode, Overlap, encode_arguments, equal_calls_may_differ, has_continuations

if TYPE_CHECKING:
    from .base import Options
    from .key import Arguments, NamedArguments
    from .task import LockableTask

__all__ = ("UNSENT_TTL", "Admitted", "claim", "free", "keep", "unclaimed")

log = Log(__name__)

#: Seconds that the lock of a call of beat lasts until it is sent. A beat that ends amid a dispatch cannot free the
#: locks that it has taken, and the next one frees none of an entry that was deleted or edited meanwhile.
UNSENT_TTL = 60.0

#: Policies by which a call takes the places of those that have not started.
REPLACING = {Overlap.CANCEL_OTHER, Overlap.TERMINATE_OTHER}


@dataclass(frozen=True, slots=True)
class Admitted:
    """A call that is to be sent, and what it has locked for that."""

    ticket: Ticket
    taken: Ref | None = None  #: its lock, to be freed if it cannot be sent
    #: How it takes the places of others: only once it is sent, so that no other gives way to a call that never comes.
    replacing: Call | None = None
    wait: float = 0.0  #: seconds that its message may wait for its start, if its lock ends before that
    terminates: bool = False  #: it ends the run that it waits for

    def give_up(self, task: LockableTask) -> None:
        """Free the lock of a call that could not be sent."""
        if self.taken is not None:
            free(task, self.taken)

    def note_sent(self, task: LockableTask) -> Holder | None:
        """Do what is to be done once the call is sent, and return the run that it waits for, or None.

        Its lock lasts for as long as its message may wait, and it takes the places of other calls. What fails here is
        logged: the call is on its way, and waits for its turn.
        """
        if self.taken is not None and self.wait > UNSENT_TTL:
            keep(task.singleton_backend, {self.taken: ""}, self.wait)
        if self.replacing is None:
            return self.ticket.waits_for
        about = {"task": task.name, "id": self.ticket.task_id}
        try:
            holder: Holder = task.singleton_backend.acquire_many([self.replacing], may_be_resent=True)[0]
        except LockBackendError as exc:
            log.warning(
                "%(task)s[%(id)s] waits for its turn: it could not replace other calls",
                event="not_replaced",
                **about,
                reason=exc,
            )
            return self.ticket.waits_for
        if holder.verdict is not Verdict.WAITING:
            return None
        if self.terminates and holder.state == "running":
            try:
                task.app.control.revoke(holder.task_id, terminate=True)
            except Exception as exc:  # a transport raises what it likes
                log.warning(
                    "%(task)s[%(id)s] waits for its turn: the run of task %(holder)s could not be terminated",
                    event="not_terminated",
                    **about,
                    holder=holder.task_id,
                    reason=safe_repr(exc),
                )
        return holder


def unclaimed(task: LockableTask, task_id: str, key: str, overlap: Overlap) -> Ticket:
    """Return the ticket of a call that holds no lock while it waits, such as one that was sent by name."""
    if overlap is Overlap.ALLOW_ALL or task.lock in {LockMode.UNTIL_EXECUTING, LockMode.UNTIL_EXPIRED}:
        return Ticket(task_id, beside(key, task_id))  # a lock of its own excludes none, and refuses copies of the call
    skipped = overlap in {Overlap.SKIP, Overlap.RAISE} and task.lock != LockMode.UNTIL_AND_WHILE_EXECUTING
    return Ticket(task_id, key) if skipped else Ticket(task_id, key, behind_key(key), waits=True)


def claim(
    task: LockableTask,
    task_id: str,
    args: Arguments | None,
    kwargs: NamedArguments | None,
    *,
    overlap: Overlap,
    options: Options,
) -> Admitted | Holder:
    """Take the lock that a call needs before it is sent, or return who holds it if the call is not to be sent.

    Raises:
        ConfigError: the app's lock backend cannot do what the policy promises.
        LockBackendError: the locks' server does not answer, or what is at the lock's key is no lock.
        TypeError: the arguments do not fit the task, or one of them cannot be encoded.
        ValueError: countdown, eta or expires among the options makes no sense.

    A task's own ``unique_on`` or ``generate_lock`` may raise anything.
    """
    key = str(task.generate_lock(task.name, args, kwargs))
    otherwise, behind = unclaimed(task, task_id, key, overlap), behind_key(key)
    if overlap is Overlap.ALLOW_ALL or task.lock == LockMode.WHILE_EXECUTING:
        return Admitted(otherwise)
    must_be_sent = has_continuations(options) or overlap is Overlap.BUFFER_ALL
    call = _call(task, Ref(key, task_id, generation(options)), args, kwargs, options)
    wait, is_of_beat = call.ttl, RUN_HEADER in (options.get("headers") or {})
    call = dataclasses.replace(call, ttl=min(wait, UNSENT_TTL) if is_of_beat else wait)
    match task.lock:
        case LockMode.UNTIL_EXECUTING:
            ticket = Ticket(task_id, otherwise.key, key)
        case LockMode.UNTIL_EXPIRED:
            ticket = otherwise
        case LockMode.UNTIL_AND_WHILE_EXECUTING:
            ticket = Ticket(task_id, key, behind, waits=True)
            call = dataclasses.replace(call, ref=dataclasses.replace(call.ref, key=behind))
        case _:
            ticket = Ticket(task_id, key, key, waits=overlap is Overlap.BUFFER_ALL)
            otherwise = Ticket(task_id, key, behind, waits=True)
            if overlap is Overlap.BUFFER_ONE:
                # At every call: one that fails now and then is found too late.
                payload = encode_arguments(task, args, kwargs) if equal_calls_may_differ(task) else ""
                ticket = dataclasses.replace(ticket, joinable=bool(payload))
                if_held = IfHeld.LEAVE if must_be_sent else IfHeld.JOIN
                call = dataclasses.replace(call, payload=payload, if_held=if_held)
    if overlap in REPLACING or call.payload:
        _check_backend(task, overlap)

    # Beat's ids are computed: the same one comes again if beat cannot know whether it was sent.
    holder = _acquire(task, call, may_be_resent=is_of_beat)
    if holder.verdict is Verdict.ACQUIRED:
        return Admitted(ticket, call.ref, wait=wait * is_of_beat)
    if holder.verdict is Verdict.WAITING:
        waits_for = holder if holder.task_id != task_id else None
        place = dataclasses.replace(call.ref, key=behind)
        return Admitted(Ticket(task_id, key, behind, waits=True, waits_for=waits_for), place, wait=wait * is_of_beat)
    if holder.task_id == task_id:  # it was sent before
        return holder
    if overlap in REPLACING:
        replacing = dataclasses.replace(call, ttl=wait, if_held=IfHeld.REPLACE)
        following = Ticket(task_id, key, behind, waits=True, waits_for=holder)
        return Admitted(following, replacing=replacing, terminates=overlap is Overlap.TERMINATE_OTHER)
    if must_be_sent:
        return Admitted(dataclasses.replace(otherwise, waits_for=holder) if otherwise.waits else otherwise)
    return holder


def _check_backend(task: LockableTask, overlap: Overlap) -> None:
    backend = task.singleton_backend
    if not backend.replaces:
        raise ConfigError(
            f"{task.name}: overlap {overlap} needs locks that keep the latest arguments and replace calls, which "
            f"{backend.name} cannot: use another word, or the default singleton_backend_class"
        )


def _call(
    task: LockableTask, ref: Ref, args: Arguments | None, kwargs: NamedArguments | None, options: Options
) -> Call:
    wait, expiry = task.time_to_start(options), task.effective_lock_expiry
    if task.lock == LockMode.UNTIL_EXPIRED and expiry:
        wait = expiry
    entry = entry_of(options.get("headers") or {})
    return Call(ref, task.name, readable(args or (), kwargs or {}, options), wait, expiry, entry=entry)


def _acquire(task: LockableTask, call: Call, *, may_be_resent: bool) -> Holder:
    """Ask for the lock of a call; free first what an earlier, refused call of this process may have got."""
    backend, ref = task.singleton_backend, call.ref
    places = [ref, dataclasses.replace(ref, key=behind_key(ref.key))]
    for place in places:
        cancel_release(place)
    try:
        holder: Holder = backend.acquire_many([call], may_be_resent=may_be_resent)[0]
        unsent = [found for place in places if (found := refused(place.key, holder.task_id))]
        if holder.verdict is Verdict.HELD and unsent:
            backend.finish_many(unsent, remember_for=0)
            holder = backend.acquire_many([call], may_be_resent=may_be_resent)[0]
    except LockBackendError:
        if not may_be_resent:
            for place in places:
                release_later(task.app, place)
        raise
    if holder.verdict is Verdict.UNUSABLE:
        raise UnusableLockError(unusable(ref.key, holder.task_id))
    if holder.verdict is Verdict.HELD and holder.state == "queued":
        _suspect(task, ref.key, holder)
    # Who holds the lock now does not concern a call that has ended.
    return dataclasses.replace(holder, task_id=ref.task_id) if holder.verdict is Verdict.DONE else holder


def keep(backend: BaseBackend, locks: Mapping[Ref, str], seconds: float) -> None:
    """Let the locks of sent messages last for so long, unless a worker has taken or freed them meanwhile.

    Args:
        locks: of each a note on where its message went; empty: none.
    """
    try:
        backend.note_sent(locks, lease=seconds)
    except LockBackendError as exc:
        text = "beat: Locks end in %(seconds)g s unless their tasks start before"
        log.warning(text, event="unlocked", seconds=UNSENT_TTL, reason=exc)


#: When this process has last noted a lock whose message may be gone, by its key.
_suspected: dict[str, float] = {}

#: Seconds after which it notes the same lock again, and how many of them it keeps in mind.
SUSPECT_AGAIN, MOST_SUSPECTS = 10.0, 1000


def _suspect(task: LockableTask, key: str, holder: Holder) -> None:
    """Let the beat that leads check an old lock, whose message may be gone."""
    config, now = Config.of(task.app), time.monotonic()
    patience, since = config.singlebeat_lost_after, holder.since
    if patience is None or since is None or (datetime.now(UTC) - since).total_seconds() < patience:
        return
    if now - _suspected.get(key, -SUSPECT_AGAIN) < SUSPECT_AGAIN:
        return
    if len(_suspected) >= MOST_SUSPECTS:
        _suspected.clear()
    _suspected[key] = now
    with suppress(LockBackendError):  # the call has its answer
        task.singleton_backend.suspect(suspects_key(config.singleton_key_prefix), key)


def free(task: LockableTask, ref: Ref, *, remember_for: float = 0.0) -> None:
    """Free the lock of a call that was not sent, at once or when the locks' server answers again.

    Args:
        remember_for: seconds for which the end of its run, if it is one, is remembered.
    """
    try:
        task.singleton_backend.finish_many([ref], remember_for=remember_for)
    except LockBackendError as exc:  # the error that brought us here matters more
        release_later(task.app, ref)
        about = {"id": ref.task_id, "reason": exc}
        log.warning("the lock of task %(id)s stays until the locks' server answers", event="lock_kept", **about)
