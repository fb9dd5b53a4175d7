"""Celery's task side: who sends a task, who runs it, and who looks after its lock meanwhile.

``delay()`` of a Singleton (``singleton``) acquires the lock of the call (``locks.acquire``) and sends its ticket in a
header. In the worker, one delivery of the message is seen by two processes:

========================== ======================================================================
main process               ``request.Request``, a subclass of Celery's; ``renewer.Renewer``, one thread
process that runs the task ``gate``, around the body of a Singleton or after a plain task
========================== ======================================================================

In threads, gevent, eventlet and solo both are one process; the code is the same.

1. *Arrival.* The request gives the delivery a nonce. The renewer renews its lock from now on, every third of a lease,
   also while the message waits for its ETA or for a free slot.
2. *Start.* ``begin``: the lock becomes running under the nonce. A copy of a run waits, a finished id is dropped, and
   a call that must wait for another run is sent again with a countdown (``gate.admit``, ``resend``). For a plain task
   that beat has sent the main process asks, before it acknowledges the message.
3. *End.* The lock is freed twice, on purpose. The process that runs the task frees it right after the body, before the
   result and before callbacks: their receivers may call the task again at once. A child
   process frees the lock of a plain task after them, if the body has succeeded or failed: the main process reads no
   results while it reconnects to its broker. The main process frees it when the request is over, which is also true of
   runs whose process was killed, of revoked and expired messages, and of any other end that no code in the task's
   process sees. The second release finds nothing to do.
4. *Death of a worker.* Its locks are renewed no longer, and end with their leases. If the broker delivers the
   message again, ``begin`` takes over.

A run may free its own lock alone: the nonce and the generation tell. A retry takes the lock over with a higher
generation (``promise``), so a late release of the run before it is harmless.

Tests: ``tests/system/test_ends.py`` (every way in which a task can end, in each pool),
``tests/model/test_lock_machine.py`` (any history of calls, runs and lost replies), ``tests/redis/test_request.py`` and
``tests/redis/test_claim.py``.
"""
