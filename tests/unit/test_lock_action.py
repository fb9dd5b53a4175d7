"""What becomes of a lock at the end of its request, held against the table of ways in which a task ends."""

from __future__ import annotations

from itertools import product

import pytest

from singlebeat.tasks.lock_action import LockAction, lock_action

WAIT, RELEASE, LATER = LockAction.WAIT, LockAction.RELEASE, LockAction.RELEASE_LATER
HAND_OVER, FORGET = LockAction.HAND_OVER, LockAction.FORGET

#: How a request ends -> acknowledged, acks_late, cancelled, past_limit, and what becomes of its lock.
#: The same ends with real workers: ``tests/system/ends.py``.
ENDS = {
    "success, early acknowledgement": (True, False, False, False, RELEASE),
    "success, late acknowledgement": (True, True, False, False, RELEASE),
    "failure, early acknowledgement": (True, False, False, False, RELEASE),
    "failure, late, acks_on_failure_or_timeout": (True, True, False, False, RELEASE),
    "failure, late, not acks_on_failure_or_timeout: rejected first": (False, True, False, False, WAIT),
    "hard time limit, acknowledged": (True, False, False, True, LATER),
    "hard time limit, late, acknowledged": (True, True, False, True, LATER),
    "hard time limit, late, requeued": (False, True, False, True, WAIT),
    "worker lost, early": (True, False, False, False, RELEASE),
    "worker lost, late, task_reject_on_worker_lost": (False, True, False, False, WAIT),
    "Reject, requeued": (False, True, False, False, WAIT),
    "revoked before its start": (True, False, False, False, RELEASE),
    "connection lost, early: the run goes on as acknowledged": (True, False, True, False, RELEASE),
    "connection lost, late: the broker delivers again": (False, True, True, False, HAND_OVER),
    "cold shutdown, late: the broker delivers again": (False, True, True, False, HAND_OVER),
    "connection lost, late, and Celery acknowledges afterwards": (True, True, True, False, FORGET),
    "the same, past its limit": (True, True, True, True, FORGET),
    "connection lost, late, past its limit": (False, True, True, True, HAND_OVER),
    "connection lost, early, past its limit": (True, False, True, True, LATER),
    "not acknowledged early: Celery has not come to it": (False, False, False, False, WAIT),
    "the same, past its limit, early": (False, False, False, True, WAIT),
    "the same, cancelled": (False, False, True, False, WAIT),
    "the same, cancelled and past its limit": (False, False, True, True, WAIT),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_has_its_action(end):
    acknowledged, acks_late, cancelled, past_limit, expected = ENDS[end]

    action = lock_action(acknowledged=acknowledged, acks_late=acks_late, cancelled=cancelled, past_limit=past_limit)

    assert action is expected


def test_the_table_has_every_combination():
    assert {row[:4] for row in ENDS.values()} == set(product([False, True], repeat=4))
