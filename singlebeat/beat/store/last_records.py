"""Whether the server has lost records of changes and decisions that this beat has seen: it started from old data."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ...lua import script

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys

__all__ = ("LastRecords",)

READ = script(__package__, "last_records")


class LastRecords:
    """The last records that this beat has seen in the streams of changes and of decisions.

    A record that is gone while an older one is there was lost: old records are removed first. A stream without older
    records shows nothing.
    """

    def __init__(self, client: RedisClient, keys: Keys) -> None:
        self.client = client
        self._streams = (keys.changes, keys.history)
        self._seen: Sequence[str] = ("",) * len(self._streams)
        self._lost_since: datetime | None = None

    def ask(self, pipe: RedisClient) -> None:
        """Ask in a pipeline for the argument of ``heard``."""
        # Not eval(), which redis-py refuses in the pipelines of clusters.
        pipe.execute_command("EVAL", READ.text, len(self._streams), *self._streams, *self._seen)

    def heard(self, reply: Sequence[str]) -> None:
        """Compare the present records with those that were seen before."""
        present, earlier = reply[::2], reply[1::2]
        gaps = [left for seen, left in zip(self._seen, earlier, strict=True) if left not in {seen, ""}]
        self._lost_since = min([*map(_moment, gaps), *filter(None, [self._lost_since])], default=None)
        self._seen = present

    def look(self) -> datetime | None:
        """Read the records, and return what ``take_loss`` does.

        Raises:
            RedisError: the server does not answer.
        """
        self.heard(READ(self.client, self._streams, self._seen))
        return self.take_loss()

    def take_loss(self) -> datetime | None:
        """Return since when records were lost, if that was found since the last call; else None."""
        since, self._lost_since = self._lost_since, None
        return since

    def forget(self) -> None:
        """Forget what was seen: its loss is known."""
        self._seen, self._lost_since = ("",) * len(self._streams), None


def _moment(id_: str) -> datetime:
    try:
        return datetime.fromtimestamp(int(id_.partition("-")[0]) / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # another program has given it
        return datetime.max.replace(tzinfo=UTC)
