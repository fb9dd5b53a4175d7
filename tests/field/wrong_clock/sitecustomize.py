"""Lets Python sleep under libfaketime 0.9.10: the absolute times of ``time.sleep`` end in EINVAL there.

Its other way, to fake the monotonic clock as well, lets timed waits for locks last for ever.
"""

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], max(0.0, seconds))


time.sleep = _sleep
