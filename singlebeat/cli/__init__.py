"""``celery singlebeat …``, and what the ``celery`` command does for every worker that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from celery.signals import celeryd_init

from ..errors import ConfigError

if TYPE_CHECKING:
    from celery.worker import WorkController

__all__ = ("Reporting", "main")

#: Where each command lives: every celery command imports this module, and most of them need none of those.
COMMANDS: Mapping[str, str] = {
    "status": "status",
    "health": "status",
    "resign": "status",
    "doctor": "doctor",
    "list": "entries",
    "show": "entries",
    "next": "entries",
    "history": "history",
    "explain": "history",
    "add": "edit",
    "edit": "edit",
    "delete": "edit",
    "pause": "edit",
    "resume": "edit",
    "trigger": "edit",
    "backfill": "edit",
    "locks": "locks",
    "unlock": "locks",
    "export": "transfer",
    "import": "transfer",
}


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _look_after_locks(instance: WorkController = None, **_: object) -> None:
    """Let every worker that the command starts look after locks; on messages without one nothing changes."""
    from ..config import Config  # noqa: PLC0415 - every celery command imports this module
    from ..tasks.worker_step import install  # noqa: PLC0415

    try:
        Config.of(instance.app)
    except ConfigError as exc:  # a signal swallows errors: this must not start with a wrong setting
        raise SystemExit(f"Error: {exc}") from None
    install(instance.app)


class Reporting(click.Command):
    """A command that ends in one line where its help cannot be written."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Return the context of a call, once its arguments are read and its help, if it is asked for, is printed."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # click ends without a word
            raise
        except OSError as exc:
            from .output import UNANSWERED, drop_output, fail  # noqa: PLC0415 - every celery command imports this module

            drop_output()
            fail(str(exc), UNANSWERED)


class _Commands(Reporting, click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"{__name__}.{COMMANDS[cmd_name]}"), f"{cmd_name}_")
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command


@click.group(name="singlebeat", cls=_Commands)
def main() -> None:
    """Look into singlebeat's schedule and locks, and change them; needs Redis, and no beat.

    Exit codes: 0 done; 1 no: there is none such, somebody else was quicker, it is not healthy; 2 it could not be
    asked: wrong usage, a wrong setting, a server that does not answer.
    """
