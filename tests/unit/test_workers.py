"""The clocks of workers, judged by their answers."""

from __future__ import annotations

import pytest

from singlebeat.diagnosis.workers import Workers

#: The time that is right while this process's monotonic clock shows 0.
NOON = 1_800_000_000.0


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
