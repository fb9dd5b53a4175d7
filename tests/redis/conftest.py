"""What tests of commands share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from singlebeat.cli import main
from singlebeat.tasks import undo


@pytest.fixture(autouse=True)
def _no_refused_calls_of_other_tests():
    """Keep what a test leaves to be freed, on a server that is gone, out of the next test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undo, "_undoing", undo._Undoing())
        yield


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
