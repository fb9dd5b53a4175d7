"""The commands ``celery singlebeat …``, and the hook that prepares every worker of the ``celery`` command."""

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

#: The module of each command, imported on demand: every celery command imports this package.
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
    "changes": "changes",
    "add": "edit",
    "edit": "edit",
    "delete": "edit",
    "pause": "edit",
    "resume": "edit",
    "trigger": "edit",
    "backfill": "edit",
    "revert": "changes",
    "locks": "locks",
    "unlock": "locks",
    "export": "transfer",
    "import": "transfer",
    "web": "web",
}


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _look_after_locks(instance: WorkController = None, **_: object) -> None:
    """Let every worker that the command starts renew and free locks; messages without a lock are not affected."""
    from ..config import Config  # noqa: PLC0415 - every celery command imports this module
    from ..tasks.worker_step import install  # noqa: PLC0415

    try:
        Config.of(instance.app)
    except ConfigError as exc:  # signals swallow errors, but no worker must start with a wrong setting
        raise SystemExit(f"Error: {exc}") from None
    install(instance.app)


class Reporting(click.Command):
    """A command that fails with a one-line error if its help cannot be written."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments, print the help if it is requested, and return the context of the call."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # click ends silently
            raise
        except OSError as exc:
            from .output import UNANSWERED, drop_output, fail  # noqa: PLC0415 - every celery command imports this module

            drop_output()
            fail(str(exc), UNANSWERED)


class _Commands(Reporting, click.Group):
    """The group of all commands, which imports each command on its first use."""

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
    """Inspect and change singlebeat's schedule and locks; needs Redis, and no running beat.

    Commands that an answer advises leave out -A APP: add it, as in the command that gave the answer.

    Only the runs of ``trigger`` and ``backfill`` need a beat that leads. Times are in UTC.

    Exit code 0: done, healthy, no problem. 1: not found, conflict or unhealthy. 2: usage error, such as a value that
    no entry can have; wrong setting; or a server that does not answer or refuses the command.
    """
