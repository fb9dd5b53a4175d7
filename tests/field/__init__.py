"""A field test bed: seeded faults over a running fleet, and an observer that knows nothing of singlebeat's code.

::

    plan       what a run consists of, made from a seed alone: fleet, entries, calls, faults, edits
    topology   the servers, and who reaches which of them through which link
    bed        carries a plan out, and records what happened: processes, links, faults, edits, exits, samples
    tasks      the app of the fleet, whose tasks record their runs on a server that has no faults
    sender     a process that makes calls of its own
    journal    reads what was written from the servers' append-only files: messages and decisions
    observer   checks the promises on these records
    compare    has RedBeat's beats and celery-singleton's tasks meet the same faults

``python -m tests.field --seed 7 --minutes 10`` runs it by hand; ``test_field.py`` is the short form.
"""
