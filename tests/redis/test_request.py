"""What the worker's main process makes of a delivery, with a real broker and no worker around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu.utils.uuid import uuid

from singlebeat import Singleton
from singlebeat.locks.base import HEADER, Ticket
from singlebeat.tasks.request import Request

Deliver = Callable[..., Request]


@pytest.fixture
def deliver(app: Celery) -> Iterator[Deliver]:
    """Returns the request that a message makes, whoever has written it."""
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:

        def deliver(task: Any, args: Any = (), kwargs: Any = None, **headers: Any) -> Request:
            task_id = uuid()
            body = (args, {} if kwargs is None else kwargs, {})
            queue.put(body, headers={"task": task.name, "id": task_id, "argsrepr": repr(args), **headers})
            message = queue.get(timeout=5)
            return Request(
                message, app=app, task=task, on_ack=message.ack_log_error, on_reject=message.reject_log_error
            )

        yield deliver


def same(user: Any) -> Any:
    return user


def task_of(app: Celery, **options: Any) -> Any:
    """Return a Singleton with these options, of one argument."""
    return app.task(same, name="app.task", base=Singleton, shared=False, **options)


class OwnKey(Singleton):
    """A Singleton whose user has written the function that makes its key."""

    abstract = True

    def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
        return f"SINGLETONLOCK_{task_args[0]['id']}"


# ---------------------------------------------------------------- messages that nobody of ours has written


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param([{"id": 7}], {}, id="no text"),
        pytest.param([{}], {}, id="no id"),
        pytest.param([None], {}, id="no user"),
        pytest.param([{"id": "a"}], ["no", "mapping"], id="kwargs that are no mapping"),
        pytest.param(7, {}, id="args that are no list"),
    ],
)
def test_a_call_whose_key_cannot_be_made_is_received_and_has_no_lock(app, deliver, redis, args, kwargs):
    function = task_of(app, unique_on=lambda user: user["id"].lower())

    assert deliver(function, args, kwargs).ticket is None
    assert not redis.keys("SINGLETONLOCK_*")


def test_a_call_for_which_the_users_own_generate_lock_fails_is_received_and_has_no_lock(app, deliver, caplog):
    task = app.task(same, name="app.task", base=OwnKey, shared=False)

    assert deliver(task, [{"id": 7}]).ticket.key == "SINGLETONLOCK_7"
    request = deliver(task, [{"name": "a"}])

    assert request.ticket is None
    assert f"app.task[{request.id}] runs without its lock" in caplog.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("waited", ["x", [1], {}, float("inf"), 10**30, -(10**30)], ids=str)
@pytest.mark.parametrize("retries", [0, "x"])
def test_a_header_that_says_nonsense_stops_nobody(app, deliver, waited, retries):
    task, task_id = task_of(app), uuid()
    header = {"id": task_id, "key": "SINGLETONLOCK_a", "waited": waited}

    request = deliver(task, ["a"], id=task_id, retries=retries, **{HEADER: header})

    assert (request.ticket.task_id, request.ticket.key) == (task_id, "SINGLETONLOCK_a")
    assert 0 <= request.ticket.waited <= 10
    assert Ticket.of_message(request.request_dict, task_id) == request.ticket, "its run reads what is left of it"
