"""Messages and decisions, as a server wrote them to its append-only file: no client and no fault stands between.

A server with ``appendfsync always`` writes each change to that file before it answers, in the order of the changes,
with what scripts have changed. So the file is complete where a ``MONITOR`` has gaps: around the death of a server.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

#: Options of a server whose file can be read so.
AOF = (
    *("--appendonly", "yes", "--appendfsync", "always", "--aof-timestamp-enabled", "yes"),
    *("--auto-aof-rewrite-percentage", "0"),
)

Command = Sequence[bytes]


def commands(data: bytes) -> Iterator[tuple[Command, int]]:
    """Yield the complete commands of a file and the offset behind each; a timestamp is a command ``#TS``."""
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        head = data[at:end]
        if head.startswith(b"#"):
            name, _, value = head.partition(b":")
            at = end + 2
            yield (name, value), at
            continue
        command: list[bytes] = []
        at = end + 2
        for _ in range(int(head[1:])):
            end = data.find(b"\r\n", at)
            start = end + 2
            stop = start + int(data[at + 1 : end]) if end >= 0 else len(data)
            if stop + 2 > len(data):
                return
            command.append(data[start:stop])
            at = stop + 2
        yield command, at


@dataclass
class Decision:
    """One record of the history."""

    at: float
    entry: str
    nominal: float
    kind: str
    decision: str
    id: str
    reason: str = ""
    holder: str = ""
    term: int = 0
    transaction: int = 0
    is_beside_redbeat: bool = False  #: made while a beat of RedBeat held the lock


@dataclass
class Message:
    """One message that was put into a queue."""

    at: float
    id: str
    task: str
    is_original: bool  #: neither a retry, nor sent again to wait, nor delivered again
    entry: str = ""
    is_redbeats: bool = False
    transaction: int = 0
    popped: float | None = None
    kept: float | None = None  #: since when a worker has had it
    acked: float | None = None


@dataclass
class Journal:
    """What happened on one server, read again and again from where the last reading ended.

    Args:
        directory: of the server.
        prefix: of the schedule's keys.
        ahead: seconds of the server's clock before the bed's, in which messages are timed; decisions keep the server's.
    """

    directory: Path
    prefix: str = "redbeat:"
    ahead: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ends: list[dict[str, str]] = field(default_factory=list)  #: ends of runs, as workers have told
    redbeat_led: list[tuple[float, float]] = field(default_factory=list)  #: when a beat of RedBeat held the lock
    writes: Counter[str] = field(default_factory=Counter)  #: commands by name

    def __post_init__(self) -> None:
        self._offsets: dict[Path, int] = {}
        self._now, self._database, self._transaction = 0.0, 0, 0
        self._queues: dict[tuple[int, str], deque[Message | None]] = defaultdict(deque)
        self._unacked: dict[str, Message] = {}
        self._last: deque[tuple[Message, str]] = deque(maxlen=100)
        self._popped: dict[str, deque[Message]] = defaultdict(deque)
        self._terms: set[str] = set()  # tokens of singlebeat's
        self._redbeats_until = 0.0  # by the server's clock; 0 while no beat of RedBeat holds the lock
        self._does: Mapping[str, Callable[[list[str]], None]] = {
            "LPUSH": self._lpush,
            "RPUSH": self._rpush,
            "LPOP": self._lpop,
            "RPOP": self._rpop,
            "HSET": self._hset,
            "HDEL": self._hdel,
            "XADD": self._xadd,
            "SET": self._set,
            "PEXPIREAT": self._expire,
            "DEL": self._delete,
            "UNLINK": self._delete,
        }

    def read(self) -> None:
        """Take in what was written since the last call."""
        for path in sorted(self.directory.glob("appendonlydir/*.incr.aof")):
            with path.open("rb") as file:
                file.seek(start := self._offsets.get(path, 0))
                data = file.read()
            for command, end in commands(data):
                self._offsets[path] = start + end
                self._take(command)

    def _take(self, command: Command) -> None:
        name = command[0].decode().upper()
        if name == "#TS":
            self._now = float(command[1]) - self.ahead
        elif name == "SELECT":
            self._database = int(command[1])
        elif name == "MULTI":
            self._transaction += 1
        else:
            self.writes[name] += 1
            if name in self._does:
                self._does[name]([part.decode(errors="replace") for part in command[1:]])

    def _lpush(self, args: list[str]) -> None:
        for raw in args[1:]:
            self._queue(args).appendleft(self._sent(raw))

    def _rpush(self, args: list[str]) -> None:
        for raw in args[1:]:
            self._queue(args).append(self._sent(raw))

    def _sent(self, raw: str) -> Message | None:
        message = _message(raw, self._now, self._transaction)
        if message is not None:
            self.messages.append(message)
            self._last.append((message, raw))
        return message

    def _lpop(self, args: list[str]) -> None:
        if queue := self._queue(args):
            self._took(queue.popleft())

    def _rpop(self, args: list[str]) -> None:
        if queue := self._queue(args):
            self._took(queue.pop())

    def _queue(self, args: list[str]) -> deque[Message | None]:
        return self._queues[self._database, args[0]]

    def _took(self, message: Message | None) -> None:
        if message is not None:
            message.popped = self._now
            self._popped[message.id].append(message)

    def _set(self, args: list[str]) -> None:
        if args[0] == f"{self.prefix}:lock":
            self._end_term()
            if args[1] not in self._terms:
                self.redbeat_led.append((self._now, 0.0))
                self._prolong_term(args[-1])

    def _expire(self, args: list[str]) -> None:
        if args[0] == f"{self.prefix}:lock" and self._redbeats_until:
            self._prolong_term(args[1])

    def _prolong_term(self, until_ms: str) -> None:
        self._redbeats_until = int(until_ms) / 1000
        self.redbeat_led[-1] = self.redbeat_led[-1][0], self._redbeats_until - self.ahead

    def _end_term(self) -> None:
        if self._redbeats_until:
            begin, end = self.redbeat_led[-1]
            self.redbeat_led[-1], self._redbeats_until = (begin, min(end, self._now)), 0.0

    def _hset(self, args: list[str]) -> None:
        if args[0] == f"{self.prefix}:leader" and "token" in args:
            self._terms.add(args[args.index("token") + 1])
        if args[0] != "unacked":
            return
        for tag, raw in zip(args[1::2], args[2::2], strict=False):
            id_ = json.loads(raw)[0]["headers"]["id"]
            if waiting := self._popped.get(id_):
                message = waiting.popleft()
                message.kept = self._now
                self._unacked[tag] = message

    def _hdel(self, args: list[str]) -> None:
        if args[0] == "unacked":
            for tag in args[1:]:
                if message := self._unacked.pop(tag, None):
                    message.acked = self._now

    def _delete(self, args: list[str]) -> None:
        for key in args:
            self._queues.pop((self._database, key), None)
            if key == f"{self.prefix}:lock":
                self._end_term()

    def _xadd(self, args: list[str]) -> None:
        if args[0] not in {f"{self.prefix}:history", f"{self.prefix}:runs"}:
            return
        at = next(
            number for number, arg in enumerate(args) if number and arg.partition("-")[0].isdigit() and "-" in arg
        )
        record = dict(zip(args[at + 1 :: 2], args[at + 2 :: 2], strict=True))
        when = int(args[at].partition("-")[0]) / 1000
        if args[0] == f"{self.prefix}:runs":
            self.ends.append({**record, "at": str(when)})
            return
        self.decisions.append(
            Decision(
                at=when,
                entry=record["entry"],
                nominal=datetime.fromisoformat(record["nominal"]).timestamp(),
                kind=record["kind"],
                decision=record["decision"],
                id=record["id"],
                reason=record["reason"],
                holder=record["holder"],
                term=int(record["term"]),
                transaction=self._transaction,
                is_beside_redbeat=when < self._redbeats_until,
            )
        )

    def stop(self) -> None:
        """Do nothing: it reads files only."""

    def acknowledged(self) -> list[str]:
        """Return the last messages that workers have acknowledged, as a broker that has forgotten that sends them."""
        copies = [json.loads(raw) for message, raw in self._last if message.acked is not None]
        for copy in copies:
            copy["properties"]["delivery_info"]["redelivered"] = True
        return [json.dumps(copy) for copy in copies]

    def waiting(self) -> int:
        """Return how many messages are in a queue or with a worker."""
        queued = sum(message is not None for queue in self._queues.values() for message in queue)
        return queued + len(self._unacked)


class Journals:
    """What happened on several servers, none of which has what the others have."""

    def __init__(self, parts: Sequence[Journal]) -> None:
        self.parts = parts

    def read(self) -> None:
        """Take in what was written since the last call."""
        for part in self.parts:
            part.read()

    @property
    def decisions(self) -> list[Decision]:
        """All decisions by their times."""
        return sorted((each for part in self.parts for each in part.decisions), key=lambda decision: decision.at)

    @property
    def redbeat_led(self) -> list[tuple[float, float]]:
        """When a beat of RedBeat held the lock."""
        return sorted(term for part in self.parts for term in part.redbeat_led)

    @property
    def ends(self) -> list[dict[str, str]]:
        """All ends of runs."""
        return [end for part in self.parts for end in part.ends]


def _message(raw: str, at: float, transaction: int) -> Message | None:
    try:
        envelope: dict[str, Any] = json.loads(raw)
        headers, properties = envelope["headers"], envelope["properties"]
    except (ValueError, KeyError, TypeError):
        return None  # of remote control, or no message at all
    if properties.get("delivery_info", {}).get("redelivered"):
        headers = {**headers, "redelivered": True}
    return message_of(headers, at, transaction)


def message_of(headers: Mapping[str, Any], at: float, transaction: int = 0) -> Message | None:
    """Return the message with these headers, None if it is none of a task."""
    if "id" not in headers or "task" not in headers:
        return None
    is_original = not (headers.get("redelivered") or headers.get("retries") or headers.get("eta"))
    # RedBeat names no entry: its name is the first argument.
    named = re.match(r"[\[(]'entry ([\w-]+)", headers.get("argsrepr") or "")
    ours = (headers.get("singlebeat") or {}).get("entry", "")
    entry = ours or (named[1] if named else "")
    is_redbeats = bool(entry and not ours)
    return Message(at, headers["id"], headers["task"], is_original, entry, is_redbeats, transaction)
