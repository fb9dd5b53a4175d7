"""Makes the workers of an app manage the locks that messages carry."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING

from celery import bootsteps
from celery.signals import task_rejected, task_unknown, worker_shutdown
from celery.utils.imports import symbol_by_name

from ..config import Config
from ..errors import ConfigError
from ..locks import worker_name
from ..locks.base import Ticket
from ..log import Log
from ..run_results import flush_ends, record_end_of_message
from .renewer import Renewer, renewer_of
from .request import Request, leave_unwritten, report_exceptions
from .resend import bind_to_delay, delays
from .succession import let_retries_keep_lock

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker import WorkController
    from celery.worker.consumer import Consumer
    from kombu import Message

    from .metrics import WorkerMetrics

__all__ = ("install",)

log = Log(__name__)

#: Signals for the ends of messages that have no Request.
UNSEEN_ENDS = (task_unknown, task_rejected)


class WorkerLockStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """The bootstep of a worker that gives every task our Request class; it starts between pool and consumer."""

    #: After both have forked, because a child must not inherit the locks of a thread that it does not inherit.
    requires = ("celery.worker.components:Pool", "celery.worker.components:Beat")
    renewer: Renewer | None = None
    metrics: WorkerMetrics | None = None
    stats: Mapping[str, Mapping[str, object]] = MappingProxyType({})

    def create(self, parent: WorkController) -> None:
        """Prepare the retries of plain tasks, before the pool forks the processes that make them."""
        for task in parent.app.tasks.values():
            if not getattr(task, "has_own_gate", False):
                let_retries_keep_lock(task)

    def start(self, parent: WorkController) -> None:
        """Prepare the tasks of the worker's app and start renewing."""
        try:
            renewer = renewer_of(parent.app)
        except ConfigError as exc:
            config = Config.of(parent.app)
            if config.singleton_backend_class or config.singleton_backend_url or _has_lock_server(parent.app):
                raise
            # Singlebeat is installed, but this app has no server for locks.
            log.info("locks are not managed", event="unlocked", reason=exc)
            return
        for task in parent.app.tasks.values():
            task.Request = _with_locks(symbol_by_name(task.Request))
        report_exceptions(parent.pool)
        leave_unwritten(parent.pool)
        if (consumer := getattr(parent, "consumer", None)) is not None:
            _forget_on_close(consumer, renewer)
        self.renewer, renewer.timer = renewer, parent.timer
        renewer.serve(parent.hostname, name=worker_name(parent.app, parent.hostname))
        # Not at the top, because every app with a Singleton imports this module; not later, while the pool forks.
        from .. import __version__  # noqa: PLC0415

        self.stats = {"singlebeat": {"version": __version__}}
        if (port := Config.of(parent.app).singlebeat_worker_metrics_port) is not None:
            from .metrics import WorkerMetrics  # noqa: PLC0415

            self.metrics = WorkerMetrics(parent.app, renewer)
            self.metrics.serve(port)
        for ended in UNSEEN_ENDS:
            ended.connect(self._end_unseen, weak=False, dispatch_uid=id(self))
        # After a warm shutdown, in which the last runs end: this step stops before the pool, which waits for them.
        worker_shutdown.connect(self._flush, sender=parent, weak=False, dispatch_uid=id(self))

    def info(self, parent: WorkController) -> Mapping[str, object]:
        """Return what ``celery inspect stats`` says about this worker; nothing if the worker does not manage locks."""
        return {name: {**about, "time": time.time()} for name, about in self.stats.items()}

    def stop(self, parent: WorkController) -> None:
        """Announce that the worker takes no more messages; its runs may go on."""
        for ended in UNSEEN_ENDS:
            ended.disconnect(dispatch_uid=id(self))
        if self.renewer is not None:
            self.renewer.retire()

    def terminate(self, parent: WorkController) -> None:
        """Do so in a cold shutdown, after which Celery sends no signal: its consumer has ended the runs before."""
        self.stop(parent)
        self._flush(parent)

    def _flush(self, sender: WorkController, **_: object) -> None:
        """Free the locks of finished messages, and record their ends, before the process ends."""
        worker_shutdown.disconnect(sender=sender, dispatch_uid=id(self))
        if self.renewer is not None:
            self.renewer.flush()
            flush_ends(sender.app)

    def _end_unseen(
        self,
        sender: Consumer = None,
        message: Message | None = None,
        signal: object = None,
        exc: BaseException | None = None,
        **_: object,
    ) -> None:
        headers = getattr(message, "headers", None) or {}
        outcome, reason = ("unknown_task", "") if signal is task_unknown else ("rejected", exc or "")
        record_end_of_message(sender.app, headers, outcome, reason, worker=sender.hostname)
        ticket = Ticket.of_message(headers, headers.get("id"))
        if ticket is not None and self.renewer is not None:
            self.renewer.finish_ticket(ticket)


def _forget_on_close(consumer: Consumer, renewer: Renewer) -> None:
    """Let a consumer that loses its broker, and drops the messages that wait in it, end their renewal."""
    on_close = consumer.on_close

    @wraps(on_close)
    def closed() -> None:
        on_close()
        renewer.forget_waiting()

    consumer.on_close = closed


def _has_lock_server(app: Celery) -> bool:
    # Not at the top: a worker whose broker is no Redis loads no client for it.
    from ..connections import lock_server  # noqa: PLC0415

    with suppress(ConfigError):
        return bool(lock_server(app).url)
    return False


class DelayStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """The bootstep by which RabbitMQ delays calls that wait; it starts each time after the queues are declared."""

    requires = ("celery.worker.consumer:Tasks",)

    def include_if(self, parent: Consumer) -> bool:
        """Return whether RabbitMQ delays the messages of the worker's app."""
        return delays(parent.app)

    def start(self, parent: Consumer) -> None:
        """Bind the queues of the worker to what RabbitMQ has delayed."""
        with suppress(Exception):  # of a lost connection, after which it starts again
            bind_to_delay(parent.app)


def _with_locks(request_class: type) -> type:
    if issubclass(request_class, Request):
        return request_class
    if issubclass(Request, request_class):
        return Request
    return type(request_class.__name__, (Request, request_class), {})


def install(app: Celery) -> None:
    """Make the workers of an app manage the locks that messages carry.

    A Singleton calls it for its app, and the ``celery`` command calls it if singlebeat is installed. Call it for
    workers that are started in another way and run plain tasks that beat dispatches.
    """
    app.steps["worker"].add(WorkerLockStep)
    app.steps["consumer"].add(DelayStep)
