"""The scheduler: when, what, who leads, where it is stored, and the tick on top of them.

Rooms, from the bottom up::

    calendar/     WHEN: nominal times of schedules; pure
    entries/      WHAT: entries, their definition and policy, as JSON and in Redis
    leadership/   WHO LEADS: the lease, the watchdog, the guard against clocks that go back
    store/        WHERE: due entries, claims, quarantine, history
    decide, message, dispatch, publisher     one occurrence on its way to the broker
    tick          the work of a leader's tick
    scheduler     Celery's scheduler: takes a role in each tick, and does its work
    schedule      the same schedule for programs; needs no beat

A tick of the leader (``Scheduler.tick``), in batches of 500; a step takes one round trip, or two, for all of
a batch, but a publish takes one for each message:

1. Lead: campaign for the lease, or keep it (``lease``). A standby's tick ends here, after 0.3 s.
2. Read due entries, and pending occurrences that are to be retried (``store.claims``). An entry that cannot be decoded
   is quarantined: it costs the others nothing.
3. Drop pending occurrences that may not run any more, and retake the others.
4. Decide about each due entry (``decide``, pure): not yet, paused, missed, or to be run; and when it is due next.
5. Claim (``claim.lua``): refused unless this term still leads and nothing that the decision was made from has changed.
   In the same step the entry moves on and the occurrence becomes pending.
6. Acquire the locks of all claimed occurrences (``dispatch``). Held by another run: the overlap policy decides.
7. Publish each under its own id, through Celery's ``apply_async``.
8. Confirm (``confirm.lua``): record the decision, and end its being pending.

The states of an occurrence::

            claim                  publish, confirm
    due ------------> pending -----------------------> dispatched | buffered
     |                 |   ^                           skipped_overlap | run_before
     | paused, missed  |   | retake, under the same id publish_failed
     v                 +---+
    decided            grace over, entry paused: missed | paused

What keeps this true:

- *Two leaders.* A beat that was suspended may believe that it leads. A claim and a retake name the term, and Redis
  refuses them once the term is over; a publish asks the lease first; a confirmation counts only while the occurrence
  is pending.
- *The broker is unreachable.* A claimed occurrence stays pending. It is retried after 1, 2, then 4 s under the same id,
  by this leader or the next one, until its ``misfire_grace_time`` is over. It holds no lock meanwhile. An entry with a
  pending occurrence gets no other: later times wait behind it, and the latest of them runs as a catch-up.
- *RabbitMQ has an alarm.* It holds one message of each connection, and delivers it when the alarm ends. So beat keeps a
  blocked connection, and sends nothing over another one (``publisher``).
- *A reply is lost, a beat is killed.* A beat keeps no state in its memory alone. A pending occurrence that is retaken
  acquires its own lock once more, by its id. If its message was sent after all, the worker drops the copy by that id.

Tests: ``tests/model/test_lease_machine.py`` (two leaders, lost replies, stopped clocks against the real scripts),
``tests/redis/test_store.py`` (each script), ``tests/redis/test_scheduler.py`` (ticks), ``tests/chaos/test_chaos.py``
(kills and faults over real servers), ``tests/incidents/test_incidents.py`` (what an operator sees).
"""
