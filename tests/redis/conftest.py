"""What tests of commands share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from singlebeat.cli import main


@pytest.fixture
def cli(app, redis):
    """Run a command, in this process."""

    def run(*args: str, code: int | None = 0, app=app, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(main, args, obj=SimpleNamespace(app=app), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code is None or result.exit_code == code, result.output
        return result

    return run
