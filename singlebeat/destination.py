"""The queue that a message goes to, where a sender can know it, or whether all workers get it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery.app.routes import MapRoute
from celery.signals import before_task_publish
from kombu import Queue
from kombu.common import Broadcast

from .missing_modules import is_maybe_missing

if TYPE_CHECKING:
    from celery import Celery

    from .locks.base import Options
    from .locks.key import Arguments, NamedArguments

__all__ = (
    "Sent",
    "are_by_others",
    "id_of_message",
    "is_sent_by_others",
    "kind_of",
    "queue_of_call",
    "queue_reached",
    "reaches_all",
    "rename_message",
    "seeing_sent",
)

#: The kinds of exchanges that pass a message on to each queue that is bound with its very routing key.
PLAIN_KINDS = ("direct", "topic", "fanout")


def is_sent_by_others(app: Celery, task: object) -> bool:
    """Return whether code of the user may choose the queue of a task's calls, and maybe another one each time.

    It may be a function among the routes, or an own ``apply_async`` or ``send_task``.
    """
    if any(not isinstance(route, MapRoute) for route in app.amqp.router.routes):
        return True
    return any(are_by_others(task, "apply_async")) or any(are_by_others(app, "send_task"))


def are_by_others(owner: object, method: str) -> Sequence[bool]:
    """Return whether each definition of a method, from the outside in, is neither Celery's nor ours."""
    of_class = _are_by_others(type(owner), method)  # type: ignore[arg-type]  # classes have hashes
    return (True, *of_class) if method in vars(owner) else of_class


@lru_cache(maxsize=1024)
def _are_by_others(kind: type, method: str) -> Sequence[bool]:
    homes = [each.__module__.partition(".")[0] for each in kind.__mro__ if method in vars(each)]
    return tuple(home not in {"celery", "singlebeat"} for home in homes)


@dataclass
class Sent:
    """What was seen of the sending of a message by code of the user, if that may choose its queue."""

    by_others: bool
    queues: list[str] = field(default_factory=list)  #: that it went to, the last one last; empty if not by others

    @property
    def is_unsent(self) -> bool:
        """Whether code of the user has sent no message under this task id: none at all, or one under another id."""
        return self.by_others and not self.queues


def id_of_message(headers: Mapping[str, object], body: object) -> str:
    """Return the task id of a message that receivers of ``before_task_publish`` get; protocol 1 has it in the body."""
    return str(headers.get("id") or (body.get("id") if isinstance(body, Mapping) else ""))


def rename_message(headers: dict[str, Any], body: Any, properties: dict[str, Any] | None, task_id: str) -> None:
    """Give a message that receivers of ``before_task_publish`` get another task id."""
    (body if "id" not in headers else headers)["id"] = task_id
    (properties if properties is not None else {})["correlation_id"] = task_id


@contextmanager
def seeing_sent(app: Celery, task: object, task_id: str) -> Iterator[Sent]:
    """Yield what is seen of the message that is sent meanwhile under a task id."""
    sent = Sent(is_sent_by_others(app, task))
    if not sent.by_others:
        yield sent
        return

    def note(
        body: object = None,
        headers: Mapping[str, Any] | None = None,
        declare: Sequence[object] | None = None,
        exchange: object = None,
        routing_key: str = "",
        **_: object,
    ) -> None:
        if id_of_message(headers or {}, body) == task_id:
            sent.queues.append(queue_reached(exchange, routing_key, (declare or [None])[0]))

    before_task_publish.connect(note, weak=False)
    try:
        yield sent
    finally:
        before_task_publish.disconnect(note)


def queue_reached(exchange: object, routing_key: str | None, queue: object) -> str:
    """Return the queue that a message reaches; empty if only the broker's bindings decide.

    Args:
        exchange: that it is sent to, or the exchange's name; empty for the broker's default exchange.
        queue: that its sender declares. Celery declares the app's default queue if only an exchange is named.
    """
    name = getattr(exchange, "name", exchange)
    if not name:
        return str(routing_key or "")
    if not isinstance(queue, Queue) or queue.exchange is None or queue.exchange.type not in PLAIN_KINDS:
        return ""
    return str(queue.name) if (queue.exchange.name, queue.routing_key) == (name, routing_key) else ""


def queue_of_call(
    app: Celery, task: str, options: Options, args: Arguments | None = None, kwargs: NamedArguments | None = None
) -> str:
    """Return the queue that Celery sends a call to; empty if the broker's bindings decide.

    Args:
        options: of the call, without those of its task.

    Raises:
        Exception: any error of a user's own router, or the queue is unknown.
    """
    route = _route(app, task, options, args, kwargs)
    queue: Any = route["queue"]
    if isinstance(queue, Broadcast):  # its name is another one in each process
        return ""
    exchange, routing_key = route.get("exchange"), route.get("routing_key")
    kind = route.get("exchange_type") or kind_of(queue)
    if (not exchange or not routing_key) and kind == "direct":  # as Celery does in ``send_task_message``
        return str(getattr(queue, "name", ""))
    if exchange is None:
        exchange, routing_key = queue.exchange, routing_key or queue.routing_key
    return queue_reached(exchange, routing_key, queue)


def reaches_all(app: Celery, task: str, options: Options, args: Arguments, kwargs: NamedArguments) -> bool:
    """Return whether each worker gets a call, as of a ``Broadcast`` queue: its exchange is of the kind ``fanout``.

    Args:
        options: of the call, without those of its task.

    Raises:
        Exception: as ``queue_of_call`` does.
    """
    kinds = {kind_of(queue) for queue in (options.get("queue"), *app.amqp.queues.values())}
    if "fanout" not in {*kinds, options.get("exchange_type")}:  # without the routers, which may be slow
        return False
    route = _route(app, task, options, args, kwargs)
    exchange, kind = route.get("exchange"), route.get("exchange_type") or kind_of(route["queue"])
    if exchange and route.get("routing_key") and not route.get("exchange_type"):  # else Celery sends it to the queue
        name = getattr(exchange, "name", exchange)
        of_name = (kind_of(queue) for queue in app.amqp.queues.values() if queue.exchange.name == name)
        kind = getattr(exchange, "type", None) or next(of_name, kind)
    return bool(kind == "fanout")


def _route(
    app: Celery, task: str, options: Options, args: Arguments | None, kwargs: NamedArguments | None
) -> Mapping[str, Any]:
    """Return the options of a call with those of its task and its route; a known queue as such."""
    if is_maybe_missing(app, task) and not options.get("queue"):
        raise LookupError(f"the module of {task} cannot be imported here, where the task may name its queue")
    known = app.tasks.get(task)
    given = {**(known._get_exec_options() if known is not None else {}), **options}
    if not given.get("queue") and not app.amqp.router.routes:  # what the router would return, a little sooner
        return {**given, "queue": app.amqp.default_queue}
    route: dict[str, Any] = app.amqp.router.route(given, task, args or (), kwargs or {}, known)
    queue = route.get("queue")
    if queue is None and route.get("exchange") is None:  # as Celery does for a route that names neither
        queue = app.amqp.default_queue
    return {**route, "queue": app.amqp.queues[queue] if isinstance(queue, str) else queue}


def kind_of(queue: object) -> str:
    """Return the kind of the exchange of a queue."""
    return str(getattr(getattr(queue, "exchange", None), "type", "direct"))
