"""Stands in for the package of the ``celery shell`` in the tests' processes.

The real one brings prompt_toolkit, which takes a third of the time of each of their hundreds of starts.
"""

from typing import Any


def register_repl(*_: Any, **__: Any) -> None:
    """Register no command."""
