"""Every view of the page by name, and what a person reads there."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from .furnished import LONG


class View(NamedTuple):
    """A view."""

    path: str
    shows: str  #: a string of its content


#: Those that every reader sees, then the forms. ``{lock}`` is a task that holds one, ``{change}`` the id of a change.
VIEWS = {
    "entries": View("/", "import feed of suppliers"),
    "entries-none": View("/?q=no+such+entry", "No entry matches"),
    "entry": View("/entry?name=send+invoices", "Next runs"),
    "entry-skipped": View("/entry?name=import+feed+of+suppliers", "skipped_overlap"),
    "entry-long": View(f"/entry?name={quote(LONG)}", "Next runs"),
    "entry-unusable": View("/entry?name=old+import", "definition"),
    "history": View("/history", "dispatched"),
    "locks": View("/locks", "running"),
    "doctor": View("/doctor", "leads"),
    "findings": View("/findings", "server"),
    "why": View("/why?name=import+feed+of+suppliers", "It runs next"),
    "quarantine": View("/quarantine", "old import"),
    "changes": View("/changes", "warehouse counts"),
    "error": View("/entry?name=no+such+entry", "There is no such entry"),
    "run": View("/run?name=send+invoices", "equal call"),
    "pause": View("/pause?name=send+invoices", "Why"),
    "resume": View("/resume?name=sync+stock", "warehouse counts"),
    "edit": View("/edit?name=send+invoices", "Check the changes"),
    "edit-rule": View("/edit?name=month+end", "Check the changes"),
    "new": View("/edit", "Check and create"),
    "duplicate": View("/edit?like=send+invoices", "Check and create"),
    "delete": View("/delete?name=send+invoices", "Delete"),
    "backfill": View("/backfill?name=send+invoices", "Show the runs"),
    "backfill-list": View("/backfill?name=send+invoices&start=2026-11-01T00:00&end=2026-11-02T12:00", "Run these 36"),
    "many": View("/many?do=pause&name=send+invoices&name=nightly+report", "How many entries"),
    "pause-all": View("/pause-all", "all entries"),
    "free": View("/free?id={lock}", "By force"),
    "resign": View("/resign", "standby"),
    "revert": View("/revert?name=nightly+report&to={change}", "before this change"),
}
