"""Makes calls of Singletons until it is ended, and records what became of each call: ``python -m … SEED``."""

from __future__ import annotations

import itertools
import random
import sys
import time
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from singlebeat.errors import LockBackendError
from tests.field.tasks import NAME, app, records

CALLS = "calls"

#: The calls that it makes: task, name, seconds of the body; ``merge`` gets a number besides.
KINDS = (
    ("skip", "asked", 1.0),
    ("in_turn", "in turn", 0.3),
    ("merge", "merged", 0.5),
    ("beside", "beside", 0.2),
    ("late_skip", "asked late", 0.5),
)


def call(task: str, arguments: list[Any]) -> dict[str, Any]:
    """Make one call, and return what is known of it."""
    try:
        result = app.tasks[f"{NAME}.{task}"].apply_async(arguments)
    except (LockBackendError, OperationalError, RedisError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"id": result.id, "duplicate": int(getattr(result, "is_duplicate", False))}


def main(seed: str) -> None:
    rng = random.Random(f"sender {seed}")
    for number in itertools.count(time.time_ns()):
        task, name, seconds = rng.choices(KINDS, weights=(4, 2, 4, 2, 2))[0]
        arguments = [name, number, seconds] if task == "merge" else [name, seconds]
        attempt = records().xadd(CALLS, {"event": "begin", "task": task, "name": name, "number": number})
        outcome = call(task, arguments)
        records().xadd(CALLS, {"event": "end", "of": attempt, **outcome})
        time.sleep(rng.expovariate(2.0))


if __name__ == "__main__":
    main(sys.argv[1])
