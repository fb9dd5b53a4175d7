"""The clocks and tasks of workers, from their answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker.control import registered

from singlebeat.diagnosis.workers import Workers, _name_and_rate_limit

#: The time that is right while this process's monotonic clock shows 0.
NOON = 1_800_000_000.0


def test_a_worker_lists_its_tasks_with_their_rate_limits():
    def work() -> None: ...

    app = Celery(set_as_current=False)
    app.task(work, name="mail.send", rate_limit="1/m", shared=False)
    app.task(work, name="mail.sort", shared=False)
    app.finalize()

    listed = registered(SimpleNamespace(app=app))

    assert "mail.send [rate_limit=1/m]" in listed
    assert {*map(_name_and_rate_limit, listed)} >= {("mail.send", "1/m"), ("mail.sort", "")}
    assert _name_and_rate_limit("mail [exchange=x routing_key=y rate_limit=2/s]") == ("mail", "2/s")
    assert _name_and_rate_limit("mail [routing_key=y]") == ("mail", "")
    for no_rate in ("fast", "1/y", "/m", "0"):
        assert _name_and_rate_limit(f"mail [routing_key=y rate_limit={no_rate}]") == ("mail", "")
        assert _name_and_rate_limit(f"mail [routing_key=y rate_limit={no_rate} rate_limit=1/m]") == ("mail", "1/m")
    assert _name_and_rate_limit("mail [rate_limit=0]") == ("mail", ""), "as celery control rate_limit takes one off"


@pytest.mark.parametrize(
    ("shown", "ahead"),
    [
        pytest.param(10.0, None, id="read when it was asked"),
        pytest.param(21.0, None, id="read when its answer came, late"),
        pytest.param(8.1, None, id="behind by less than may be"),
        pytest.param(7.9, -2.1, id="behind"),
        pytest.param(22.9, None, id="ahead by less than may be"),
        pytest.param(23.1, 13.1, id="ahead even if it was read when its answer came"),
    ],
)
def test_a_clock_is_wrong_when_no_moment_of_the_question_explains_it(shown, ahead):
    workers = Workers({}, {}, {}, {}, {"w": NOON + shown}, (10.0, 21.0))

    found = {worker: round(off, 1) for worker, off in workers.wrong_clocks(NOON, more_than=2)}

    assert found == ({} if ahead is None else {"w": ahead})
