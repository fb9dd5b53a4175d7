"""A worker that gets SIGTERM as soon as it has given a run to its pool; the app is that of ``slow_threads``."""

from __future__ import annotations

import os
import signal
from functools import wraps
from typing import Any

from celery.concurrency.base import BasePool

from tests.system.slow_threads import app

__all__ = ("app",)

_apply_async = BasePool.apply_async


@wraps(_apply_async)
def _given(self: BasePool, *args: Any, **options: Any) -> Any:
    given = _apply_async(self, *args, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return given


BasePool.apply_async = _given
