"""``Singleton``: a task whose equal calls exclude one another."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from celery import Task
from celery.canvas import Signature, _chain, _chord
from celery.result import AsyncResult
from celery.utils.imports import symbol_by_name
from kombu.utils.uuid import uuid

from .. import signals
from ..config import Config
from ..errors import DuplicateTaskError, LockBackendError, UnusableLockError
from ..locks import backend_of
from ..locks import time_to_start as seconds_to_start
from ..locks.acquire import Refused, free, note_of_call, plan_call, unlocked_ticket
from ..locks.base import (
    HEADER,
    RUN_HEADER,
    BaseBackend,
    Call,
    Holder,
    Ref,
    Ticket,
    Verdict,
    generation,
    unusable,
)
from ..locks.key import canonical, digest, is_encodable, lock_key
from ..locks.modes import LockMode, Overlap, check, has_continuations, overlap_for, pick, signature_of
from ..locks.send import send_call, send_many
from ..log import Log
from .eager import run_eagerly
from .gate import Run, run_under_lock
from .succession import Publish, hand_over_and_send
from .worker_step import install

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Producer

    from ..locks.acquire import Plan
    from ..locks.base import Options
    from ..locks.key import Arguments, NamedArguments

__all__ = ("Singleton",)

log = Log(__name__)

#: A call of ``apply_async_many``; and what its message is made from.
_Call: TypeAlias = "tuple[Arguments | None, NamedArguments | None, Options]"
_Planned: TypeAlias = tuple[Ticket, Overlap, dict[str, Any], Publish]


def _or_duplicate(send: Callable[..., AsyncResult], *args: Any, **given: Any) -> AsyncResult | DuplicateTaskError:
    """Return the result of a call, or the error of a duplicate: the calls behind it are sent first."""
    try:
        return send(*args, **given)
    except DuplicateTaskError as exc:
        return exc


class Singleton(Task):  # type: ignore[misc]
    """Base class of tasks whose calls exclude their duplicates: calls of the same task with the same arguments.

    While an equal call is queued or running, a duplicate is not sent. The sender gets the ``AsyncResult`` of the equal
    call, with ``is_duplicate`` true. The class has all options and methods of celery-singleton, and some more.

    Raises:
        ConfigError: at the definition, if options are wrong or contradict each other.
    """

    abstract = True
    Request = "singlebeat.tasks.request:Request"
    #: Read by the Request class: this task acquires its lock itself, in the process that runs it.
    has_own_gate = True

    #: The arguments that make a call unique, given by their names, by dotted paths into them (``"user.id"``), or by a
    #: function of all of them. With [] the task runs once at a time, with any arguments; None is for all arguments.
    #: With ``pydantic=True``, the function gets the arguments as they are sent: a model as a dict.
    unique_on: Sequence[str] | str | Callable[..., object] | None = None
    #: In which time a call excludes its duplicates, as a word of ``LockMode``.
    lock: str = LockMode.UNTIL_EXECUTED
    #: What becomes of a duplicate, as a word of ``Overlap``; None for the setting ``singlebeat_overlap``. A call may
    #: have its own: ``task.apply_async(args, overlap="raise")``.
    overlap: str | None = None
    #: The same as ``overlap="raise"``; None for the setting ``singleton_raise_on_duplicate``.
    raise_on_duplicate: bool | None = None
    #: Seconds from the call after which its lock ends, even if the task still runs. They count from the start of the
    #: run if calls with other arguments have joined it. None is for the setting ``singleton_lock_expiry``.
    lock_expiry: float | None = None

    call_signature = inspect.Signature()
    call_defaults: NamedArguments = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # Of a subclass or of another base, as in Flask's pattern for tasks.
        if not hasattr(cls.__call__, _UNDER_LOCK):
            cls.__call__ = _under_lock(cls.__call__)  # type: ignore[method-assign]
        run = inspect.getattr_static(cls, "run")
        # Of the class: a wrapper around an instance's ``run`` may show ``self`` in its signature or hide it.
        cls.call_signature = signature_of(run)
        parameters = cls.call_signature.parameters.values()
        cls.call_defaults = {each.name: _kept(each.default) for each in parameters if each.default is not each.empty}
        if inspect.isfunction(function := vars(cls).get("unique_on")):
            cls.unique_on = staticmethod(function)  # else the function would get the task as its first argument
        if not vars(cls).get("abstract"):
            check(cls, getattr(cls, "name", None) or cls.__name__)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Let the app's workers renew and free locks as soon as the app has a task that needs it."""
        super().on_bound(app)
        install(app)

    @property
    def singleton_config(self) -> Config:
        """The settings of the app."""
        return Config.of(self.app)

    @property
    def singleton_backend(self) -> BaseBackend:
        """The lock backend of the app."""
        return backend_of(self.app)

    @property
    def has_pure_keys(self) -> bool:
        """Return whether equal calls always have the same lock key, because no user function computes the key."""
        return type(self).generate_lock is Singleton.generate_lock and not callable(self.unique_on)

    def generate_lock(
        self, task_name: str, task_args: Arguments | None = None, task_kwargs: NamedArguments | None = None
    ) -> str:
        """Return the key of the lock of a call; override this method to use another key.

        Let it begin with ``singleton_key_prefix``: commands, page and ``clear_locks`` find no other locks, and only
        ``release_lock`` frees them.

        Raises:
            TypeError: the arguments do not fit the task, or one of them cannot be encoded; the message names it.
        """
        config = self.singleton_config
        encoder = config.singleton_json_encoder_class
        encoder = symbol_by_name(encoder) if encoder else None

        def key(args: Arguments, kwargs: NamedArguments) -> str:
            return lock_key(config.singleton_key_prefix, digest(task_name, args, kwargs, encoder=encoder))

        args, kwargs = self.as_sent(task_args, task_kwargs)
        try:
            bound = self.call_signature.bind(*args, **kwargs)
        except TypeError as exc:
            if not self.typing and self.unique_on is None:
                return key(args, kwargs)
            run = inspect.getattr_static(type(self), "run")
            is_decorated = hasattr(getattr(run, "__func__", run), "__wrapped__")
            hint = "; a decorator that supplies it has to set __signature__ to what callers give" * is_decorated
            raise TypeError(f"{task_name}: {exc}{hint}") from exc
        if self.unique_on is None:
            return key(*canonical(bound, self._defaults_as_sent(bound), encoder))
        defaults = self.call_signature.parameters.keys() - bound.arguments
        self._apply_defaults(bound)
        try:
            return key([], pick(self.unique_on, bound))
        except TypeError:
            if not defaults or callable(self.unique_on):
                raise
            return key([], self._picked_with_json(self.unique_on, defaults, bound, encoder))

    def _defaults_as_sent(self, bound: inspect.BoundArguments) -> NamedArguments:
        """Return the defaults of a task by the names of its arguments; of the given ones as a call would send them."""
        if getattr(self, "_dump_pydantic_arguments", None) is None:
            return self.call_defaults
        given = {name: self.call_defaults.get(name, value) for name, value in bound.arguments.items()}
        defaults = inspect.BoundArguments(self.call_signature, OrderedDict(given))
        args, kwargs = self.as_sent(defaults.args, defaults.kwargs)
        sent = self.call_signature.bind(*args, **kwargs).arguments
        return {name: value for name, value in sent.items() if name in self.call_defaults}

    def _apply_defaults(self, bound: inspect.BoundArguments) -> None:
        """Add what a call leaves out, as it was when the task was defined."""
        given = {**bound.arguments}
        bound.apply_defaults()
        bound.arguments.update({name: value for name, value in self.call_defaults.items() if name not in given})

    def _picked_with_json(
        self,
        unique_on: Sequence[str] | str,
        defaults: Set[str],
        bound: inspect.BoundArguments,
        encoder: type | None,
    ) -> dict[str, object]:
        """Return the values that make a call unique, without those of defaults that JSON cannot encode.

        Celery sends no defaults, so such a call has a message. Without a value it equals no call that gives one.

        Args:
            defaults: names of the arguments that the call does not give.
            bound: all arguments.
        """
        args, kwargs = self.as_sent(bound.args, bound.kwargs)  # a model counts as a given one
        bound = self.call_signature.bind(*args, **kwargs)
        self._apply_defaults(bound)
        return {
            path: value
            for path, value in pick(unique_on, bound).items()
            if path.partition(".")[0] not in defaults or is_encodable(value, encoder)
        }

    def as_sent(self, args: Arguments | None, kwargs: NamedArguments | None) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of a call as Celery sends them: a pydantic model as a dict."""
        sent = list(args or ()), dict(kwargs or {})
        if getattr(self, "_dump_pydantic_arguments", None) is not None:
            args, kwargs = self._dump_pydantic_arguments(*sent)
            return list(args), dict(kwargs)
        return sent

    def apply_async(
        self,
        args: Arguments | None = None,
        kwargs: NamedArguments | None = None,
        task_id: str | None = None,
        producer: Producer | None = None,
        link: Signature | Sequence[Signature] | None = None,
        link_error: Signature | Sequence[Signature] | None = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Send the task unless an equal call is queued or running; accept all arguments of ``Task.apply_async``.

        A call for which other calls wait (chain, chord, group, link) is always sent, and waits for its turn.

        Args:
            overlap: a word of ``Overlap``, in place of the task's policy.

        Returns:
            The result of the sent call, or of the equal call if this call is a duplicate (``is_duplicate``).

        Raises:
            DuplicateTaskError: an equal call holds the lock, and the policy is ``raise``.
            ConfigError: the policy contradicts the task's lock.
            LockBackendError: the locks' server does not answer, and ``singleton_on_backend_error`` is ``raise``, or it
                is None and no other call waits for this one.
        """
        given = {**options, "producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        asked_for, has_new_id, task_id = given.pop("overlap", None), not task_id, str(task_id or uuid())
        publish = self._publisher(args, kwargs, task_id, given)
        own, is_eager = self._own_ticket(task_id, options), self.app.conf.task_always_eager
        if own is not None and not own.nonce and not is_eager:
            return publish()  # beat, the author of this header, has acquired what the call needs, in a batch
        overlap = overlap_for(self, asked_for)
        if is_eager:
            key = self.generate_lock(self.name, args, kwargs)
            done = run_eagerly(self, key, task_id, publish, overlap=overlap)
            return self._duplicate(done, args, kwargs, overlap, given) if isinstance(done, Holder) else done
        if (run := own or self._replaced_run(task_id, args, kwargs, options)) is not None:
            ttl = self.time_to_start(options)
            return hand_over_and_send(self, run, options, publish, request=self.request, ttl=ttl)
        key = str(self.generate_lock(self.name, args, kwargs))
        about: dict[str, Any] = {"options": given, "key": key, "has_new_id": has_new_id}
        about["is_awaited"] = self._is_own_retry(options)  # under another id, else it had its ticket
        plan = plan_call(self, task_id, args, kwargs, overlap=overlap, **about)
        try:
            sent = send_call(self, plan, publish, producer, options)
        except LockBackendError as exc:
            policy = self.singleton_config.singleton_on_backend_error
            if policy == "raise" or (policy is None and not self._is_awaited(given, has_new_id=has_new_id)):
                raise
            ticket = plan.otherwise or unlocked_ticket(self, task_id, key, overlap)
            return self._send_without_lock(ticket, publish, exc)
        return self._duplicate(sent.holder, args, kwargs, overlap, given) if isinstance(sent, Refused) else sent

    def _said_by_beat(self, task_id: str, options: Options) -> Mapping[str, object]:
        """Return the header in which beat names the entry of a run that makes a call in its own place."""
        maker = self.app.current_worker_task
        if maker is None or maker.request.id != task_id or generation(options) <= generation(vars(maker.request)):
            return {}
        said = vars(maker.request).get(RUN_HEADER)
        return {RUN_HEADER: dict(said)} if isinstance(said, Mapping) and len(said) else {}

    def _own_ticket(self, task_id: str, options: Options) -> Ticket | None:
        """Return the ticket that a call has already: from beat, or of the run that makes it as its retry.

        What a run passes on of its headers says nothing: its sender may have written only some (Sentry does), and a
        task that replaces another gets the headers and the id of that.
        """
        maker = self.app.current_worker_task
        if maker is None or maker.request.id != task_id:
            return Ticket.of_message(options.get("headers") or {}, task_id)
        run = getattr(self.request, RUN_HEADER, None) if self.request_stack is not None else None
        is_ours = isinstance(run, Run) and run.ticket.task_id == task_id
        return run.ticket if isinstance(run, Run) and is_ours and self._is_own_retry(options) else None

    def _is_own_retry(self, options: Options) -> bool:
        """Return whether the run of this task that makes a call makes it as its retry."""
        maker = self.app.current_worker_task
        if maker is None or maker.name != self.name:
            return False
        nesting = (each.get("replaced_task_nesting") or 0 for each in (options, vars(maker.request)))
        return len({*nesting}) == 1 and (options.get("retries") or 0) > maker.request.retries

    def _is_awaited(self, options: Options, *, has_new_id: bool) -> bool:
        """Return whether a chain, a chord or the like waits for a call; often Celery makes it, and would hear no error.

        Celery gives a callback the id of its parent, and the body of a chord the id that was promised.
        """
        is_promised = not has_new_id and self.app.current_worker_task is not None
        return is_promised or has_continuations(options) or options.get("parent_id") is not None

    def _publisher(
        self, args: Arguments | None, kwargs: NamedArguments | None, task_id: str, given: dict[str, Any]
    ) -> Publish:
        """Return a function that sends the message of a call with a ticket, and asks for no lock.

        Raises:
            TypeError: Celery refuses the arguments when it makes the message, which a duplicate does not have.
        """
        if not self.app.conf.task_always_eager:
            if args and not isinstance(args, list | tuple):
                raise TypeError(f"{self.name}: args must be a list or a tuple, not of type {type(args).__name__}")
            if kwargs and not isinstance(kwargs, Mapping):
                raise TypeError(f"{self.name}: kwargs must be a mapping, not of type {type(kwargs).__name__}")

        def publish(ticket: Ticket | None = None, **more: object) -> AsyncResult:
            options = {**given, **more}
            if ticket is not None:
                options["headers"] = {**(given.get("headers") or {}), HEADER: ticket.header()}
            if kept := self._said_by_beat(task_id, given):
                options["headers"] = {**kept, **(options.get("headers") or {})}
            result = super(Singleton, self).apply_async(args, kwargs, task_id=task_id, **options)
            if not isinstance(result, AsyncResult):  # of a user's class
                result = self.AsyncResult(task_id)
            result.is_duplicate, result.waits_for = False, None
            return result

        return publish

    def apply_async_many(
        self, calls: Iterable[tuple[Arguments | None, NamedArguments | None, Options]], producer: Producer | None = None
    ) -> list[AsyncResult]:
        """Send many calls as ``apply_async`` would send them one after the other, in a few round trips.

        Args:
            calls: each with args, kwargs and options of ``apply_async``.

        Returns:
            The results in the order of the calls; equal calls among them are duplicates of the first one.

        Raises:
            DuplicateTaskError: a call with ``overlap="raise"`` is a duplicate, the first of them if there are several;
                all other calls were sent.
            Exception: as of ``apply_async``. Some calls may be sent by then: call it again with the same ones, of which
                those are duplicates as long as they wait or run.
        """
        results: list[AsyncResult | DuplicateTaskError] = []
        waiting: list[_Call] = []
        for args, kwargs, given in calls:
            options = given or {}
            if self._is_one_of_many(options):
                waiting.append((args, kwargs, options))
                continue
            results += self._send_many(waiting, producer)
            waiting = []
            results.append(_or_duplicate(self.apply_async, args, kwargs, **{"producer": producer, **options}))
        results += self._send_many(waiting, producer)
        for result in results:
            if isinstance(result, DuplicateTaskError):
                raise result
        return results

    def _is_one_of_many(self, options: Options) -> bool:
        """Return whether a call with these options can be sent together with others."""
        is_ours = type(self).apply_async is Singleton.apply_async and not self.app.conf.task_always_eager
        return (
            is_ours
            and not {"producer", "connection", "add_to_parent"} & options.keys()
            and HEADER not in (options.get("headers") or {})
        )

    def _send_many(
        self, calls: Sequence[_Call], producer: Producer | None
    ) -> Iterator[AsyncResult | DuplicateTaskError]:
        if not calls:
            return
        planned: list[_Planned] = []

        def plans() -> Iterator[tuple[Plan, Publish]]:
            for args, kwargs, options in calls:
                given = dict(options)
                given_id = given.pop("task_id", None)
                task_id = str(given_id or uuid())
                overlap = overlap_for(self, given.pop("overlap", None))
                about, is_new = {**given, "producer": producer}, not given_id
                publish = self._publisher(args, kwargs, task_id, given)
                key = str(self.generate_lock(self.name, args, kwargs))
                planned.append((unlocked_ticket(self, task_id, key, overlap), overlap, given, publish))
                plan = plan_call(
                    self, task_id, args, kwargs, overlap=overlap, options=about, key=key, has_new_id=is_new
                )
                yield plan, publish

        sent = 0
        for outcome in send_many(self, plans(), producer):
            sent += 1
            yield _or_duplicate(self._result_of, outcome, calls[sent - 1], planned[sent - 1], producer)
        for args, kwargs, options in calls[sent:]:  # the locks' server has not answered
            yield _or_duplicate(self.apply_async, args, kwargs, **{"producer": producer, **options})

    def _result_of(
        self,
        outcome: AsyncResult | Refused | LockBackendError | None,
        call: _Call,
        planned: _Planned,
        producer: Producer | None,
    ) -> AsyncResult:
        """Return the result of one of many calls, once it is sent."""
        (args, kwargs, _), (ticket, overlap, given, publish) = call, planned
        if isinstance(outcome, Refused):
            return self._duplicate(outcome.holder, args, kwargs, overlap, given)
        if isinstance(outcome, LockBackendError):
            if self.singleton_config.singleton_on_backend_error != "run":
                raise outcome
            # Perhaps it is written, and has run by now: with a lock it would run again.
            return self._send_without_lock(ticket, publish, outcome)
        if outcome is not None:
            return outcome
        return self.apply_async(args, kwargs, ticket.task_id, producer, overlap=overlap, **given)

    def _send_without_lock(self, ticket: Ticket, publish: Publish, why: LockBackendError) -> AsyncResult:
        about = {"task": self.name, "id": ticket.task_id, "reason": why}
        log.warning("%(task)s[%(id)s] is sent without its lock", event="unlocked", **about)
        return publish(ticket)

    def _replaced_run(
        self, task_id: str, args: Arguments | None, kwargs: NamedArguments | None, options: Options
    ) -> Ticket | None:
        """Return the ticket of the run that a call replaces, if the run makes this call and both have the same lock."""
        if self.request_stack is None:  # Celery has registered the task and not bound it yet, so it has no run
            return None
        run = getattr(self.request, RUN_HEADER, None)
        # Found by its id: of what ``replace`` sends, one call inherits the id of the run. It may begin a chain.
        if not isinstance(run, Run) or run.ticket.task_id != task_id or generation(options) <= run.ticket.generation:
            return None
        return run.ticket if str(self.generate_lock(self.name, args, kwargs)) == run.ticket.key else None

    def _duplicate(
        self,
        holder: Holder,
        args: Arguments | None,
        kwargs: NamedArguments | None,
        overlap: Overlap,
        options: Options,
    ) -> AsyncResult:
        about = {"task": self.name, "holder": holder.task_id, "state": holder.state, "holder_entry": holder.entry}
        log.info("%(task)s is a duplicate of task %(holder)s: not sent", event="duplicate", **about)
        signals.duplicate.send(sender=self, task_id=holder.task_id, args=args, kwargs=kwargs, at="send")
        if overlap is Overlap.RAISE:
            message = f"an equal call of {self.name} is queued or running as task {holder.task_id}"
            raise DuplicateTaskError(message, holder.task_id, holder)
        result = self.on_duplicate(holder.task_id)
        if isinstance(result, AsyncResult):
            result.is_duplicate, result.holder = True, holder
            # As Celery does for a call that is sent: its caller does not wait for a result that is not stored.
            result.ignored = bool(options.get("ignore_result", self.ignore_result))
        return result

    def on_duplicate(self, existing_task_id: str) -> AsyncResult:
        """Return the result of a duplicate call; override this method to return another one."""
        return self.AsyncResult(existing_task_id)

    @property
    def effective_lock_expiry(self) -> float | None:
        """Seconds from the call after which its lock ends, from the task or else the app; None if there is no bound."""
        return self.lock_expiry if self.lock_expiry is not None else self.singleton_config.singleton_lock_expiry

    def time_to_start(self, options: Options) -> float:
        """Return the seconds that a message sent with these options may wait for its start."""
        ttl = self.singleton_config.singlebeat_queued_ttl
        return seconds_to_start({"expires": self.expires, **options}, queued_ttl=ttl, now=datetime.now(UTC))

    def on_replace(self, sig: Signature) -> None:
        """Raise the generation of the part that inherits the id of this run; Celery leaves out the body of a chord."""
        nesting, parts = (self.request.replaced_task_nesting or 0) + 1, [sig]
        while parts:
            part = parts.pop()
            if part.options.get("task_id") == self.request.id:
                part.set(replaced_task_nesting=nesting)
            inner = part.tasks if isinstance(part, _chain) else [part.body] if isinstance(part, _chord) else []
            parts += [each for each in inner if isinstance(each, Signature)]
        super().on_replace(sig)

    def get_existing_task_id(self, lock: str) -> str | None:
        """Return the id of the task that holds a lock, or None."""
        return self.singleton_backend.get(lock)

    def aquire_lock(self, lock: str, task_id: str, **options: Any) -> bool:
        """Acquire a lock for a task id and the options of its message; return whether the task id holds the lock now.

        Raises:
            LockBackendError: the locks' server does not answer, or the lock's key holds other data.
        """
        ref, wait, expiry = Ref(lock, task_id), self.time_to_start(options), self.effective_lock_expiry
        call = Call(ref, self.name, "", wait, expiry, note=note_of_call(self, ref, options))
        holder = self.singleton_backend.acquire_many([call])[0]
        if holder.verdict is Verdict.UNUSABLE:
            raise UnusableLockError(unusable(lock, holder.reason))
        return holder.verdict is not Verdict.HELD

    acquire_lock = aquire_lock

    def lock_and_run(self, lock: str, *args: Any, task_id: str | None = None, **kwargs: Any) -> AsyncResult | None:
        """Send the task under a lock of the caller's choice; return None if another task holds that lock."""
        task_id = str(task_id or uuid())
        send = partial(super().apply_async, *args, task_id=task_id, **kwargs)
        if self.app.conf.task_always_eager:
            done = run_eagerly(self, lock, task_id, send)
            return None if isinstance(done, Holder) else done
        # An override may accept only the two arguments of celery-singleton.
        known = kwargs if type(self).aquire_lock is Singleton.aquire_lock else {}
        try:
            if not self.aquire_lock(lock, task_id, **known):
                return None
            return send(headers={**(kwargs.get("headers") or {}), HEADER: Ticket(task_id, lock, lock).header()})
        except LockBackendError:
            raise
        except BaseException:
            free(self, Ref(lock, task_id))
            raise

    def release_lock(self, task_args: Arguments | None = None, task_kwargs: NamedArguments | None = None) -> None:
        """Free the lock of a call, whichever task holds it."""
        self.unlock(self.generate_lock(self.name, task_args, task_kwargs))

    def unlock(self, lock: str) -> None:
        """Free a lock, whichever task holds it."""
        self.singleton_backend.unlock(lock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under its lock in a worker, and as a plain function in a direct call."""
        following, run = super().__call__, getattr(self.request, RUN_HEADER, None)
        # The tracer has pushed the request already; Task.__call__ would push a second request.
        body = self.run if getattr(following, "__func__", None) is Task.__call__ else following
        if isinstance(run, Run) and run.begins:  # by the __call__ of a subclass
            run.begins = False
            return body(*args, **kwargs)
        with run_under_lock(self, args, kwargs) as call:
            if call is None:
                return following(*args, **kwargs)
            return body(*call[0], **call[1])


#: The mark of each ``__call__`` that runs the task under its lock.
_UNDER_LOCK = "is_under_lock"


def _kept(default: object) -> object:
    """Return a default as it is now: a body may change the list or the dict that it is."""
    try:
        return copy.deepcopy(default) if isinstance(default, list | dict | set) else default
    except Exception:  # an object's own methods may raise any error
        return default


def _under_lock(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` that holds the lock around another one, which may call ``run`` or that of its base."""

    @functools.wraps(own)
    def __call__(self: Singleton, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is that of a class
        with run_under_lock(self, args, kwargs) as call:
            if call is None:
                return own(self, *args, **kwargs)
            run = getattr(self.request, RUN_HEADER, None)
            if isinstance(run, Run):
                run.begins = True
            return own(self, *call[0], **call[1])

    setattr(__call__, _UNDER_LOCK, True)
    return __call__


setattr(Singleton.__call__, _UNDER_LOCK, True)
