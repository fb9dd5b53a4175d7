"""The table of the API's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

from ...beat.entries.state import State
from ...beat.page import Sort
from ...overlap import Overlap
from ..actions import ACTIONS, MOST_RUNS
from ..security import Role
from ..views import MOST_ROWS
from . import calls
from .calls import Call, Result
from .parameters import Parameter
from .schemas import INSTANT, STRING, Schema, array, or_null, record, ref

__all__ = ("OPERATIONS", "Operation")


class Operation(NamedTuple):
    """An operation: how it is asked for, who may do so, and what it answers."""

    method: str
    path: str  #: below ``/api``
    call: Callable[[Call], Result]
    meaning: str
    role: Role
    answer: Schema | None  #: None: no content
    query: Sequence[Parameter] = ()
    body: Sequence[Parameter] = ()
    status: Sequence[int] = (200,)  #: of its answers
    is_change: bool = True  #: it changes more than nothing; a GET never does
    has_version: bool = False  #: its answer has an ETag
    conditions: Sequence[str] = ()  #: headers that it heeds: If-Match, If-None-Match

    @property
    def id(self) -> str:
        """Its name in the description."""
        return self.call.__name__


NAME = Parameter("name", "Name of the entry.", is_required=True)
OPTIONAL_NAME = Parameter("name", "Name of the entry; by default all entries.")
NOTE = Parameter("note", "The reason, for other operators.")
TAG = Parameter("tag", "Only the entries with this tag.")
ALL = Parameter("all", "All entries; then without a tag.", "boolean", default=False)
DEFINITION = Parameter("definition", "Task, schedule and arguments.", "object", is_required=True, schema="definition")
POLICY = Parameter("policy", "Options of the policy.", "object", schema="policy")
#: The least role that may store an entry.
EDITORS = Role.ADMIN

#: What an entry has besides: a client may send an entry as it has read it.
READ_ONLY = ("name", "state", "why", "next", "tags", "is_static", "words", "problems", "meta")


def _count(default: int, most: int, what: str) -> Parameter:
    return Parameter("count", f"Most {what}.", "integer", default=default, least=1, most=most)


def _overlap(default: str | None, meaning: str) -> Parameter:
    words = [word.value for word in Overlap if word is not Overlap.RAISE]
    return Parameter("overlap", meaning, default=default, words=words)


_PAUSES = array(ref("Pause"))
_RUNS = array(INSTANT)

OPERATIONS: Sequence[Operation] = (
    Operation(
        "GET",
        "/status",
        calls.status,
        "Return who leads, and how many entries are scheduled and overdue.",
        Role.READ,
        ref("Status"),
    ),
    Operation(
        "GET",
        "/doctor",
        calls.doctor,
        "Check servers, settings, beats, workers, entries and locks.",
        Role.READ,
        record(findings=array(ref("Finding"))),
    ),
    Operation(
        "GET",
        "/entries",
        calls.list_entries,
        "Return a page of entries.",
        Role.READ,
        record(
            entries=array(ref("Row")),
            cursor={**STRING, "description": "Of the next page; empty at the end."},
            total={"type": "integer", "description": "Number of all entries, whether they meet the conditions or not."},
        ),
        (
            Parameter("search", "Only entries with this string in the name or the task.", default=""),
            Parameter("task", "Only entries of this task.", default=""),
            Parameter("state", "Only entries in this state.", default="", words=("", *map(str, State))),
            Parameter("tag", "Only entries with this tag.", default=""),
            Parameter("sort", "The order.", default="next", words=get_args(Sort)),
            Parameter("descending", "Reverse the order.", "boolean", default=False),
            Parameter("size", "Most entries.", "integer", default=50, least=1, most=MOST_ROWS),
            Parameter("cursor", "Of the page before, in the same order.", default=""),
        ),
    ),
    Operation(
        "GET",
        "/entry",
        calls.get_entry,
        "Return an entry, with its version as ETag.",
        Role.READ,
        ref("Entry"),
        (NAME,),
        has_version=True,
    ),
    Operation(
        "PUT",
        "/entry",
        calls.put_entry,
        "Store an entry, new or in place of an old one, which keeps its past. The body may be an entry as it was read: "
        "what a client cannot set is ignored, and masked arguments keep their stored values. Without If-Match, an old "
        "entry also keeps its pause.",
        EDITORS,
        ref("Entry"),
        (NAME,),
        (DEFINITION, POLICY),
        (200, 201),
        has_version=True,
        conditions=("If-Match", "If-None-Match"),
    ),
    Operation(
        "PATCH",
        "/entry",
        calls.patch_entry,
        "Replace the given parts of an entry, and keep the others. In the policy, null removes an option.",
        EDITORS,
        ref("Entry"),
        (NAME,),
        (
            Parameter("definition", "The parts to be replaced.", "object", schema="definition_parts"),
            POLICY,
        ),
        has_version=True,
        conditions=("If-Match",),
    ),
    Operation(
        "DELETE",
        "/entry",
        calls.delete_entry,
        "Delete an entry, even a broken one. An entry of beat_schedule comes back with the next term of leadership. "
        "200: its place is removed, and its key, `left`, stays, because another program holds it.",
        ACTIONS["/delete"].role,
        record(name=STRING, deleted={"type": "boolean"}, left=STRING),
        (NAME,),
        status=(200, 204),
        conditions=("If-Match",),
    ),
    Operation(
        "POST",
        "/preview",
        calls.preview,
        "Return in words what an entry would do, its next runs, and what the shifts of the clocks do to them.",
        EDITORS,
        record(words=STRING, runs=_RUNS, effects=array(STRING), unknown_task=STRING),
        body=(DEFINITION, POLICY),
        is_change=False,
    ),
    Operation(
        "GET",
        "/next",
        calls.next_runs,
        "Return the next times of an entry, whether it is paused or not.",
        Role.READ,
        record(runs=_RUNS),
        (NAME, _count(10, 1000, "times"), Parameter("after", "Only later times.", "instant")),
    ),
    Operation(
        "GET",
        "/explain",
        calls.explain,
        "Explain why an entry ran, did not run, or will run.",
        Role.READ,
        record(sentences=array(STRING)),
        (NAME,),
    ),
    Operation(
        "GET",
        "/history",
        calls.history,
        "Return the last decisions and the ends of their runs.",
        Role.READ,
        record(records=array(ref("Record"))),
        (OPTIONAL_NAME, _count(20, 1000, "decisions")),
    ),
    Operation(
        "POST",
        "/run",
        calls.run,
        "Let an entry run as soon as a beat leads, even if it is paused, disabled or finished.",
        ACTIONS["/run"].role,
        record(name=STRING, task_id=STRING),
        (NAME,),
        (_overlap(None, "What becomes of the run if it meets an equal call; by default as the entry says."),),
        (202,),
    ),
    Operation(
        "POST",
        "/pause",
        calls.pause,
        "Let the times of an entry pass without a run. `replaced`: the note, maybe another user's, that it had.",
        ACTIONS["/pause"].role,
        record(name=STRING, paused={"type": "boolean"}, replaced=STRING),
        (NAME,),
        (NOTE,),
    ),
    Operation(
        "POST",
        "/resume",
        calls.resume,
        "End the pause of an entry. Runs that were due meanwhile are not made up for.",
        ACTIONS["/resume"].role,
        record(name=STRING, paused={"type": "boolean"}, was_paused={"type": "boolean"}),
        (NAME,),
    ),
    Operation(
        "GET",
        "/pauses",
        calls.pauses,
        "Return the pauses of many entries that last.",
        Role.READ,
        record(pauses=_PAUSES),
    ),
    Operation(
        "POST",
        "/pause-many",
        calls.pause_many,
        "Let the times of all entries, or of those with a tag, pass without a run. `replaced`: the pause, maybe "
        "another user's, that was there.",
        ACTIONS["/pause-all"].role,
        record(pauses=_PAUSES, replaced=or_null(ref("Pause"))),
        body=(TAG, ALL, NOTE, Parameter("until", "When the pause ends by itself; by default never.", "instant")),
    ),
    Operation(
        "POST",
        "/resume-many",
        calls.resume_many,
        "End a pause of all entries, or of those with a tag. Other pauses last.",
        ACTIONS["/resume-all"].role,
        record(was_paused={"type": "boolean"}, pauses=_PAUSES),
        body=(TAG, ALL),
    ),
    Operation(
        "POST",
        "/backfill",
        calls.backfill,
        "Let an entry run once for each of its times after start until end. The runs are handed to beat one by one. A "
        "repetition goes on where an unfinished backfill is, and lets all times run again after a complete one: if the "
        "answer was lost, see /history before you repeat it.",
        ACTIONS["/backfill"].role,
        record(name=STRING, runs=_RUNS, begun={"type": "boolean"}),
        (NAME,),
        (
            Parameter("start", "The runs are later.", "instant", is_required=True),
            Parameter("end", "The last run is not later. Its time must have passed.", "instant", is_required=True),
            _overlap(Overlap.BUFFER_ALL.value, "What becomes of a run that meets an equal call."),
            Parameter(
                "limit",
                "Most runs; if there are more, none is sent.",
                "integer",
                default=MOST_RUNS,
                least=1,
                most=MOST_RUNS,
            ),
            Parameter("dry_run", "Only return the times.", "boolean", default=False),
        ),
        (200, 202),
    ),
    Operation(
        "GET",
        "/backfill",
        calls.backfill_progress,
        "Return how far a backfill is that this process has begun.",
        Role.READ,
        record(total={"type": "integer"}, count={"type": "integer"}, is_over={"type": "boolean"}, problem=STRING),
        (NAME,),
    ),
    Operation(
        "GET",
        "/changes",
        calls.changes,
        "Return who has changed an entry, and what; latest first.",
        Role.READ,
        record(changes=array(ref("Change"))),
        (OPTIONAL_NAME, _count(20, 1000, "changes")),
    ),
    Operation(
        "POST",
        "/revert",
        calls.revert,
        "Let an entry have the definition and policy again that it had before a change; if another program has removed "
        "the entry, and the change is its last one, those that it had after it.",
        ACTIONS["/revert"].role,
        ref("Entry"),
        (NAME,),
        (Parameter("to", "Id of the change.", is_required=True),),
        conditions=("If-Match",),
        has_version=True,
    ),
    Operation(
        "GET",
        "/locks",
        calls.locks,
        "Return the held locks.",
        Role.READ,
        record(locks=array(ref("Lock"))),
    ),
    Operation(
        "POST",
        "/unlock",
        calls.unlock,
        "Free a lock, unless its owner is known to be alive. Force needs the role admin.",
        ACTIONS["/free"].role,
        record(key=STRING, task_id=STRING, unlocked={"type": "boolean"}),
        body=(
            Parameter("which", "Task id of its owner, or its key.", is_required=True),
            Parameter("force", "Free it even if its owner may be alive: that run goes on.", "boolean", default=False),
        ),
    ),
    Operation(
        "GET",
        "/quarantine",
        calls.quarantine,
        "Return the entries that beat cannot use.",
        Role.READ,
        record(entries=array(record(name=STRING, reason=STRING, since=or_null(STRING)))),
    ),
    Operation(
        "POST",
        "/resign",
        calls.resign,
        "End the present term of leadership: a standby leads next.",
        ACTIONS["/resign"].role,
        record(before={"type": "object", "description": "The leader whose term was ended."}),
    ),
)

#: The paths, in the order of the table.
PATHS = tuple(dict.fromkeys(each.path for each in OPERATIONS))

#: The operations by path and method.
BY_PATH: Mapping[str, Mapping[str, Operation]] = {
    path: {each.method: each for each in OPERATIONS if each.path == path} for path in PATHS
}
