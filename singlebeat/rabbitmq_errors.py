"""What a refusal of RabbitMQ means, by its code and the class of the method that it answers (AMQP 0-9-1, 1.2, 1.8)."""

from __future__ import annotations

from kombu.exceptions import ChannelError
from kombu.exceptions import ConnectionError as AMQPConnectionError

__all__ = ("is_of_one_message", "is_refused_queue", "may_pass", "reaches_no_queue")

#: The classes of methods: about the connection as a whole, exchanges, queues, messages. 0: it answers no method.
_NONE, _CONNECTION, _CHANNEL, _EXCHANGE, _QUEUE, _MESSAGE = 0, 10, 20, 40, 50, 60

#: Codes of a server that closes or forbids something, has no such virtual host, lets another connection use the queue
#: alone, lacks resources, is at a limit, or fails. They count for each method.
_MAY_PASS = frozenset({320, 402, 403, 405, 506, 530, 541})

#: Codes for a missing queue or exchange, and for a mismatch. They pass if they answer a declaration: the node of the
#: queue is away, or another process has declared it with other arguments. A mismatch of a message lasts.
_NOT_FOUND, _PRECONDITION_FAILED = 404, 406

#: The code for a message that reaches no queue.
_NO_ROUTE = 312


def may_pass(exc: BaseException) -> bool:
    """Return whether RabbitMQ refuses what it may take later: for want of a right, a resource, a node or a queue."""
    answered, code = _answer(exc)
    return (
        _is_of_full_queue(exc)
        or reaches_no_queue(exc)
        or answered == _CONNECTION
        or code in _MAY_PASS
        or (code in {_NOT_FOUND, _PRECONDITION_FAILED} and answered in {_EXCHANGE, _QUEUE})
    )


def is_of_one_message(exc: BaseException) -> bool:
    """Return whether a refusal that may pass concerns the queue or the exchange of a message, and not every message."""
    return may_pass(exc) and _answer(exc)[0] not in {_NONE, _CONNECTION, _CHANNEL}


def reaches_no_queue(exc: BaseException) -> bool:
    """Return whether RabbitMQ has no queue for a message, or no exchange.

    It may have been deleted since it was declared; or its node is away, or no worker has declared it yet.
    """
    answered, code = _answer(exc)
    return code == _NO_ROUTE or (code == _NOT_FOUND and answered == _MESSAGE)


def is_refused_queue(exc: BaseException) -> bool:
    """Return whether RabbitMQ refuses a queue that there is, or would be."""
    return may_pass(exc) and "no queue" not in str(exc)


def _is_of_full_queue(exc: BaseException) -> bool:
    # By its name: a process whose broker is Redis does not load the driver of RabbitMQ.
    return type(exc).__name__ == "MessageNacked"


def _answer(exc: BaseException) -> tuple[int, int]:
    """Return the class of the method that a refusal answers, and its code; -1 for neither."""
    if not isinstance(exc, AMQPConnectionError | ChannelError):
        return -1, -1
    method = getattr(exc, "method_sig", None)
    return (method[0] if method else -1), getattr(exc, "reply_code", None) or -1
