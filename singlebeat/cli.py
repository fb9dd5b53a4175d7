"""``celery singlebeat …``, and what the ``celery`` command does for every worker that it starts."""

from __future__ import annotations

import json
from typing import Any

import click
from celery.signals import celeryd_init

from .errors import ConfigError, SinglebeatError

__all__ = ("main",)


@celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _look_after_locks(instance: Any = None, **_: Any) -> None:
    """Let every worker that the command starts look after locks; on messages without one nothing changes."""
    from .config import Config  # noqa: PLC0415 - every celery command imports this module
    from .tasks.install import install  # noqa: PLC0415

    try:
        Config.of(instance.app)
    except ConfigError as exc:  # a signal swallows errors: this must not start with a wrong setting
        raise SystemExit(f"Error: {exc}") from None
    install(instance.app)


@click.group(name="singlebeat", help="Look into singlebeat's schedule and locks.")
def main() -> None:
    """Group the commands."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show who leads, and how much is scheduled, pending and set aside."""
    from .beat.keys import Keys  # noqa: PLC0415
    from .connections import RedisError, schedule_client  # noqa: PLC0415

    app = ctx.obj.app
    try:
        keys, client = Keys.of(app), schedule_client(app)
        with client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.lease.leader)
            pipe.zcard(keys.schedule)
            pipe.zcard(keys.pending)
            pipe.hgetall(keys.quarantine)
            leader, entries, pending, quarantine = pipe.execute()
    except (RedisError, SinglebeatError) as exc:
        raise click.ClickException(str(exc)) from exc
    if as_json:
        click.echo(json.dumps({"leader": leader, "entries": entries, "pending": pending, "quarantine": quarantine}))
        return
    who = "{host}, pid {pid}, term {term}, since {since}".format(**leader) if leader else "nobody"
    click.echo(f"leader      {who}")
    click.echo(f"entries     {entries}")
    click.echo(f"pending     {pending}")
    click.echo(f"quarantine  {len(quarantine)}")
    for member, record in quarantine.items():
        click.echo(f"  {member}: {json.loads(record)['reason']}")
