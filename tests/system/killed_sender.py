"""A worker that is killed when a body has ended, before what follows the run is sent; the app is that of ``apps``."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from celery.canvas import Signature

from tests.system.apps import app

__all__ = ("app",)


def _killed(*_: Any, **__: Any) -> NoReturn:
    os.killpg(os.getpgrp(), signal.SIGKILL)  # a worker under test leads a group of its own
    raise AssertionError


Signature.apply_async = _killed
