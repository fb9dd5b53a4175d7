"""When messages that the broker did not take are retried."""

from __future__ import annotations

from singlebeat.beat.backoff import LOGGED_EACH, REFUSED_LOGGED_EACH, Backoff


def test_an_unreachable_broker_is_asked_less_and_less_often():
    backoff, waits = Backoff(), []
    for at in range(5):
        backoff.failed(f"e{at}")
        waits.append(backoff.seconds("behind"))

    assert waits == [1, 2, 4, 4, 4]


def test_a_failure_is_news_once_until_something_succeeds():
    backoff = Backoff()

    assert [backoff.failed("a"), backoff.failed("a"), backoff.failed("b")] == [True, False, False]
    backoff.succeeded("b")
    assert [backoff.failed("a"), backoff.failed("b")] == [False, True]


def test_an_entry_that_fails_by_itself_does_not_slow_down_others():
    backoff = Backoff()
    for _ in range(5):
        backoff.failed("a")
        backoff.succeeded("b")
    backoff.failed("a")

    assert (backoff.seconds("a"), backoff.seconds("c")) == (4, 1)
    assert (backoff.failures_of("a"), backoff.failures_of("b")) == (6, 0)


def test_an_unreachable_lock_server_is_news_once_and_asked_less_often():
    backoff = Backoff()

    assert [backoff.failed(), backoff.failed()] == [True, False]
    assert backoff.seconds("behind") == 2
    backoff.succeeded("a")
    assert backoff.failed()


def test_many_failures_are_no_number_too_large():
    backoff = Backoff()
    for _ in range(5000):
        backoff.failed("a")

    assert backoff.seconds("a") == 4


def test_a_forgotten_entry_has_no_failures_and_says_nothing_of_servers():
    backoff = Backoff()
    backoff.failed("a")
    backoff.forget("a")

    assert not backoff.failures_of("a")
    assert not backoff.failed("b"), "the server has not answered since"


def test_an_entry_that_fails_alone_is_named_now_and_then():
    backoff, named = Backoff(), []
    for at in range(1, LOGGED_EACH + 5):
        backoff.failed("a")
        backoff.succeeded("b")
        named += [at] * backoff.fails_alone("a")
    refused = [backoff.refused("c") for _ in range(REFUSED_LOGGED_EACH + 1)]

    assert named == [2, LOGGED_EACH + 2]
    assert [at for at, is_named in enumerate(refused, 1) if is_named] == [1, REFUSED_LOGGED_EACH + 1]
    backoff.succeeded("c")
    assert backoff.refused("c")


def test_a_refused_message_is_tried_less_often_until_it_is_not_refused():
    backoff = Backoff()
    delays = []
    for _ in range(8):
        backoff.refused("a")
        delays.append(backoff.seconds("a"))

    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.seconds("b") == 1
    backoff.failed("a")
    assert backoff.seconds("a") == 4
    backoff.forget("a")
    assert [backoff.refused("a"), backoff.seconds("a")] == [True, 1]
