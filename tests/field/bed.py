"""Carries a plan out on real servers and processes, and records what happened."""

from __future__ import annotations

import heapq
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from celery.schedules import crontab, schedule
from redbeat.schedules import rrule
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from singlebeat import Schedule
from singlebeat.errors import SinglebeatError
from tests.field import tasks
from tests.field.observer import Call, Edited, Exit, Happened, Naming, Records, Run, Sample, Stored
from tests.field.plan import Edit, Fault, Given, Plan, Process
from tests.field.sender import CALLS
from tests.field.topology import Topology, open_topology, read_only
from tests.proxy import Link, Weather
from tests.support import ROOT, CeleryProcess, RedisServer, _spawn, alive, free_port, wait_until

#: Settings of the whole fleet: leases and timeouts are short, so that many faults outlast them in a short time.
CONF: Mapping[str, Any] = {
    "beat_scheduler": "singlebeat.Scheduler",
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # By default workers look for the messages of dead workers every 100 s.
    "broker_transport_options": {
        "visibility_timeout": 10,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 10,
    },
    "redbeat_lock_timeout": 4,
    "singlebeat_history_limit": 100_000,
    "singlebeat_lock_lease": 6,
    "singlebeat_lost_after": 5,
    "singlebeat_queued_ttl": 120,
    "singlebeat_socket_timeout": 2,
    "singleton_on_backend_error": "raise",
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 2,
}

#: Settings of a beat of RedBeat: a standby asks for the lock after each ``beat_max_loop_interval``, by default 300 s.
REDBEAT: Mapping[str, Any] = {
    "beat_scheduler": "redbeat.RedBeatScheduler",
    "beat_max_loop_interval": 1,
    "redbeat_redis_options": {"socket_timeout": 2, "retry_period": 30},
}

#: Seconds between two measurements of the fleet, and between two messages to each worker's own queue.
SAMPLE_EVERY, PROBE_EVERY = 5.0, 5.0

#: Seconds of a fault after which doctor and the metrics are asked about it; a fault that is longer must be named.
ASKED_AFTER, NAMED_AFTER = 3.0, 10.0

#: Seconds after which the metrics are read: a call to a server that hangs is tried three times.
SCRAPED_AFTER = 9.8

#: The commands that tell the size of a key of a type, and what differs in the keys of one family.
SIZES = {"hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "list": "LLEN"}
VARIES = re.compile(r"\{[0-9a-f]{8,}\}|[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{16,}")

#: What a process with a wrong clock imports first.
WRONG_CLOCK = ROOT / "tests/field/wrong_clock"

#: Of the time, a starved process runs so many seconds, and stands so many.
RUNS, STANDS = 0.01, 0.09

#: Seconds in which the fleet must come to rest after the last fault.
REST = 120.0


@dataclass
class Slot:
    """A place in the fleet, and the process that has it now."""

    given: Process
    args: tuple[str, ...]
    conf: Mapping[str, Any]
    process: CeleryProcess | None = None
    metrics_port: int = 0
    is_down: bool = True  #: on purpose
    release: str = "new"
    history: list[CeleryProcess] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.given.name


class RunWatch:
    """Follows the runs on the observer's server, and notes when their processes die."""

    def __init__(self, server: RedisServer) -> None:
        self.runs: dict[str, Run] = {}
        self._client = server.client()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        last = "0"
        while not self._stops.is_set():
            for _, found in self._client.xread({tasks.RUNS: last}, block=50) or []:
                for last, record in found:
                    self._take(int(last.partition("-")[0]) / 1000, record)
            now = time.time()
            for run in list(self.runs.values()):
                if run.ended is None and run.died is None:
                    if alive(run.pid):
                        run.seen_alive = now
                    else:
                        run.died = now
            self._stops.wait(0.02)

    def _take(self, at: float, record: Mapping[str, str]) -> None:
        if record["event"] == "start":
            number = int(record.get("number", 0))
            about = {key: record[key] for key in ("run", "task", "id", "name", "host")}
            self.runs[record["run"]] = Run(**about, pid=int(record["pid"]), number=number, started=at, seen_alive=at)
        elif record["run"] in self.runs:
            self.runs[record["run"]].ended = at

    def open(self) -> list[Run]:
        """Return the runs that go on."""
        return [run for run in self.runs.values() if run.ended is None and run.died is None]

    def stop(self) -> None:
        self._stops.set()
        self._thread.join()


class Bed:
    """One run: start it in a ``with`` block, call ``run``, and read ``records``.

    Args:
        libfaketime: path of the library, for a plan with wrong clocks.
        old: commit of the old release, for a plan with upgrades.
        results: whether results are kept: they tell a beat of the runs on workers without singlebeat.

    """

    #: Settings of a fleet that is not as ``CONF`` says, the class of Singletons where singlebeat is missing, and the
    #: program that sends.
    OTHERWISE: Mapping[str, Any] = {}
    SINGLETON = "celery:Task"
    SENDER = Process("sender")

    def __init__(
        self,
        plan: Plan,
        *,
        libfaketime: str = "",
        old: str = "",
        results: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self.plan, self.libfaketime, self.old, self.results, self.say = plan, libfaketime, old, results, say
        self.conf = {**CONF, **self.OTHERWISE}
        bare = frozenset(process.name for process in (*plan.beats, *plan.workers) if process.is_bare)
        self.records = Records(plan.entries, is_one_server=plan.topology in {"one", "sentinel"}, bare=bare)
        self.slots: dict[str, Slot] = {}
        self._starved: set[int] = set()
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._doctors: list[tuple[subprocess.Popen[Any], Path, Fault, Happened]] = []
        self._stack = ExitStack()
        self._edits = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="field")))
            if self.old:
                self._unpack(self.old)
            self.observer = stack.enter_context(RedisServer())
            os.environ["SB_FIELD_RECORDS"] = self.observer.tcp_url
            self.topology: Topology = stack.enter_context(self._open_topology())
            if self.results:
                url = self.topology.server.tcp_url
                self.conf |= {"result_backend": url, "redis_socket_timeout": 2, "task_ignore_result": False}
            self.journal, self.messages = self.topology.journals()
            self._connect()
            # An operator of its own link, and one who does not depend on the weather: for the set-up and its end.
            self.operator = self._app("operator")
            self.setup = tasks.make_app({**self.conf, **self.topology.direct()})
            stack.callback(self.messages.stop)
            stack.callback(self.setup.close)
            stack.callback(self.operator.close)
            self.watch = RunWatch(self.observer)
            stack.callback(self.watch.stop)
            stack.callback(self._kill_all)
            self._ends = threading.Event()
            starving = threading.Thread(target=self._starve, daemon=True)
            starving.start()
            stack.callback(starving.join)
            stack.callback(self._ends.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _open_topology(self) -> AbstractContextManager[Topology]:
        steps = any(fault.kind == "server_clock" for fault in self.plan.faults)
        libfaketime = self.libfaketime if steps else ""
        options = self.conf["broker_transport_options"]
        return open_topology(self.plan.topology, self.plan.seed, options, libfaketime=libfaketime)

    def _connect(self) -> None:
        self.redis = self.topology.client(socket_timeout=2, retry=Retry(NoBackoff(), 2))
        # A server that hangs must not delay the end of its fault.
        self.counting = self.topology.client(socket_timeout=0.3, retry=Retry(NoBackoff(), 0))

    # ---------------------------------------------------------------- the fleet

    def _unpack(self, commit: str) -> None:
        """Put the package of a commit where processes of the old release find it first."""
        archive = subprocess.run(
            ["git", "archive", "--format=tar", commit, "singlebeat"], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
            packed.extractall(self.directory / "old", filter="data")

    def _app(self, name: str) -> Any:
        return tasks.make_app({**self.conf, **self.topology.urls(name)})

    def _start_fleet(self) -> None:
        for process in self.plan.beats:
            self._add(process, ("beat", "-s", "none", "-l", "INFO"), self.topology.urls(process.name))
        for process in self.plan.workers:
            slots = {"prefork": ("-c", "3"), "threads": ("-c", "4"), "gevent": ("-c", "10"), "solo": ()}[process.pool]
            queues = ("-Q", f"celery,{process.name}", "-n", f"{process.name}@%h")
            conf = self.topology.urls(process.name, is_worker=True)
            self._add(process, ("worker", "-P", process.pool, *slots, *queues), conf)
        for slot in self.slots.values():
            self._start(slot)
        for slot in self.slots.values():
            slot.process.ready(timeout=90)
        settings = {**self.conf, **self.topology.urls("sender")}
        env = {**os.environ, "SB_FIELD_CONF": json.dumps(settings), **self._env(self.SENDER)}
        with (self.directory / "sender.log").open("wb") as log:
            self.sender = _spawn(
                [sys.executable, "-m", "tests.field.sender", str(self.plan.seed)], stdout=log, cwd=ROOT, env=env
            )

    def _add(self, process: Process, args: tuple[str, ...], conf: Mapping[str, Any]) -> None:
        port = free_port()
        key = "singlebeat_metrics_port" if args[0] == "beat" else "singlebeat_worker_metrics_port"
        redbeat = REDBEAT if process.is_bare and args[0] == "beat" else {}
        self.slots[process.name] = Slot(process, args, {**self.conf, **redbeat, **conf, key: port}, metrics_port=port)
        self.slots[process.name].release = self.plan.releases[0]

    def _env(self, process: Process) -> Mapping[str, str]:
        """Return what hides singlebeat from a bare process."""
        if not process.is_bare:
            return {}
        # Nearer than the installed package, and without its entry points.
        info = self.directory / "none" / "celery_singlebeat-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: celery-singlebeat\nVersion: 0\n")
        paths = (info.parent, ROOT / "tests/without_shell", ROOT)
        return {"SB_FIELD_SINGLETON": self.SINGLETON, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def _start(self, slot: Slot) -> None:
        env = {"SB_FIELD_CONF": json.dumps(slot.conf), "TMPDIR": str(self.directory)}
        if not slot.given.has_right_clock:
            # The monotonic clock stays right, as it does on a host.
            faked = {"LD_PRELOAD": self.libfaketime, "FAKETIME_TIMESTAMP_FILE": str(self._clock_of(slot.given))}
            env |= {**faked, "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            paths = (WRONG_CLOCK, ROOT / "tests/without_shell", ROOT)
            env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        if slot.release == "old":
            paths = (self.directory / "old", *(() if slot.given.has_right_clock else (WRONG_CLOCK,)))
            env["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, ROOT / "tests/without_shell", ROOT)))
        env |= self._env(slot.given)
        slot.process = CeleryProcess(*slot.args, app="tests.field.tasks", env=env, cwd=self.directory)
        slot.history.append(slot.process)
        slot.is_down = False

    def _clock_of(self, process: Process) -> Path:
        return self.directory / f"clock of {process.name}"

    def _set_clocks(self) -> None:
        """Let the clocks of hosts drift on."""
        for process in (*self.plan.beats, *self.plan.workers):
            if not process.has_right_clock:
                new = self.directory / "new clock"
                new.write_text(f"{process.ahead + process.drift * self._elapsed:+.3f}s\n")
                new.replace(self._clock_of(process))

    def _kill_all(self) -> None:
        for slot in self.slots.values():
            for process in slot.history:
                process.kill_group()
        for slot in self.slots.values():
            for process in slot.history:
                with suppress(AssertionError):
                    process.stop(grace=0)
        if hasattr(self, "sender"):
            self.sender.kill()
            self.sender.wait()

    def _starve(self) -> None:
        while not self._ends.wait(RUNS):
            starved = list(self._starved)
            for signum, pause in ((signal.SIGSTOP, STANDS), (signal.SIGCONT, 0.0)):
                for pid in starved:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signum)
                if starved and pause:
                    time.sleep(pause)

    # ---------------------------------------------------------------- the run

    def run(self) -> Records:
        """Carry the plan out, wait for the fleet to come to rest, and return what happened."""
        self._begun = time.monotonic()
        self._set_clocks()
        self._start_fleet()
        self.records.began = time.time()
        self._begun = time.monotonic()
        for given in self.plan.entries:
            self._put(given)
        for fault in self.plan.faults:
            self._at(fault.at, lambda fault=fault: self._begin(fault))
        for edit in self.plan.edits:
            self._at(edit.at, lambda edit=edit: self._edit(edit))
        self._at(SAMPLE_EVERY, self._sample)
        self._at(1.0, self._probe)
        self._work_off(self.plan.seconds)
        self._settle()
        return self.records

    def _at(self, moment: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._numbers), action))

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _work_off(self, until: float) -> None:
        while (self._agenda and self._agenda[0][0] <= until) or self._elapsed < until:
            due = min(self._agenda[0][0] if self._agenda else until, until)
            while (left := due - self._elapsed) > 0:
                time.sleep(min(left, 0.1))
                self._check_exits()
            while self._agenda and self._agenda[0][0] <= min(self._elapsed, until):
                heapq.heappop(self._agenda)[2]()

    def _check_exits(self) -> None:
        for slot in self.slots.values():
            if not slot.is_down and slot.process.returncode is not None:
                exit_ = Exit(time.time(), slot.name, slot.process.returncode, slot.process.tail(300))
                self.records.exits.append(exit_)
                self.say(f"{self._elapsed:7.1f} s {slot.name} ended by itself with {slot.process.returncode}")
                self._start(slot)
        for doctor, path, fault, happened in list(self._doctors):
            if doctor.poll() is not None:
                self._doctors.remove((doctor, path, fault, happened))
                text, is_late = path.read_text(errors="replace"), happened.ended < float("inf")
                self.records.namings.append(Naming(str(fault), fault.kind, fault.whom, "doctor", text, is_late))

    def _sample(self) -> None:
        self._at(self._elapsed + SAMPLE_EVERY, self._sample)
        self._set_clocks()
        self.journal.read()
        self.messages.read()
        for slot in self.slots.values():
            if not slot.is_down:
                with suppress(OSError, KeyError):  # it has ended, and has no memory any more
                    self.records.samples.append(self._measured(slot))
        with suppress(RedisError):
            self.records.stored.append(Stored(time.time(), self._count_elements()))

    def _measured(self, slot: Slot) -> Sample:
        status = _status(slot.process.pid)
        children = 0
        for pid in Path(f"/proc/{slot.process.pid}/task/{slot.process.pid}/children").read_text().split():
            with suppress(OSError, KeyError):  # it ends
                children += _memory(_status(pid))
        connections = sum(link.connections for link in self.topology.links.get(slot.name, ()))
        return Sample(
            time.time(),
            slot.name,
            slot.process.pid,
            memory=_memory(status),
            threads=int(status["Threads"]),
            files=len(os.listdir(f"/proc/{slot.process.pid}/fd")),
            connections=connections,
            children=children,
        )

    def _count_elements(self) -> Mapping[str, int]:
        """Return how many elements the server keeps in the keys of each family; a stream, which is capped, has one."""
        found: Counter[str] = Counter()
        keys = list(self.counting.scan_iter(count=1000))
        pipeline = self.counting.pipeline(transaction=False)
        for key in keys:
            pipeline.type(key)
        sized = [(key, SIZES[type_]) for key, type_ in zip(keys, pipeline.execute(), strict=True) if type_ in SIZES]
        for key, command in sized:
            pipeline.execute_command(command, key)
        sizes = iter(pipeline.execute(raise_on_error=False))
        found.update(VARIES.sub("*", key) for key in keys)
        for key, _ in sized:
            if isinstance(size := next(sizes), int):  # no error: the key may have gone, and come again as another
                found[VARIES.sub("*", key)] += size
        return found

    def _probe(self) -> None:
        self._at(self._elapsed + PROBE_EVERY, self._probe)
        for worker in self.plan.workers:
            self._send_probe(worker.name)

    def _send_probe(self, worker: str) -> None:
        # From a thread: the broker may be away. Nothing is retried: it counts what was sent.
        def send() -> None:
            with suppress(Exception):
                task = self.setup.tasks[f"{tasks.NAME}.plain"]
                sent = task.apply_async([f"probe {worker}"], queue=worker, retry=False)
                self.records.probes.append((time.time(), worker, sent.id))

        threading.Thread(target=send, daemon=True).start()

    # ---------------------------------------------------------------- faults

    def _begin(self, fault: Fault) -> None:
        self.say(f"{self._elapsed:7.1f} s begins: {fault}")
        positions = {name: (slot.process, slot.process.position) for name, slot in self.slots.items() if slot.process}
        began = time.time()
        whom, heal = self._harm(fault)
        happened = Happened(fault.kind, whom, began, weather=dict(fault.weather))
        self.records.faults.append(happened)
        if fault.seconds > NAMED_AFTER:
            self._at(self._elapsed + ASKED_AFTER, lambda: self._ask(fault, happened))
            self._at(self._elapsed + SCRAPED_AFTER, lambda: self._scrape(fault, happened))

        def end() -> None:
            heal()
            happened.ended = time.time()
            if fault.seconds > NAMED_AFTER:
                self._at(self._elapsed + 5, lambda: self._read_logs(fault, happened, positions))

        if fault.seconds:
            self._at(self._elapsed + fault.seconds, end)
        else:
            end()

    def _harm(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return getattr(self, f"_{fault.kind}")(fault)

    def _links(self, whom: str) -> list[Link]:
        groups = {
            "": list(self.topology.links),
            "beats": [process.name for process in self.plan.beats],
            "workers": [process.name for process in self.plan.workers],
        }
        return [link for name in groups.get(whom, [whom]) for link in self.topology.links.get(name, ())]

    def _weather(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        links = self._links(fault.whom)
        special = {"black_hole": Weather(passes=False), "refused": Weather(refuses=True)}
        weather = special.get(fault.kind) or Weather(**fault.weather)
        for link in links:
            link.weather = weather
            if fault.kind == "refused":
                link.reset()

        def clear_up() -> None:
            for link in links:
                link.weather = Weather()

        return fault.whom, clear_up

    _slow_network = _resets = _black_hole = _refused = _weather

    def _half_open(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        for link in self._links(fault.whom):
            link.half_open()
        return fault.whom, lambda: None

    def _connections_reset(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        for link in self._links(fault.whom):
            link.reset()
        return fault.whom, lambda: None

    def _server_killed(self, fault: Fault, server: RedisServer | None = None) -> tuple[str, Callable[[], object]]:
        server = server or self.topology.server
        server.kill()
        return "", server.start

    def _failed_over(self, _: Fault) -> tuple[str, Callable[[], object]]:
        self.topology.fail_over()
        self._connect()
        return "", lambda: None

    def _slot_moved(self, _: Fault) -> tuple[str, Callable[[], object]]:
        held = [f"{lock}}}" for lock in (key.partition("}")[0] for key in self._held())]
        for key in ("", *held[:5]):
            self.topology.cluster.move_slot(key)
        return "", lambda: None

    def _server_clock(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        self._step(fault.weather["ahead"])
        return "", lambda: self._step(0.0)

    def _step(self, ahead: float) -> None:
        self.journal.read()
        self.journal.ahead = ahead
        self.topology.server.set_clock(ahead)

    def _broker_killed(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._server_killed(fault, self.topology.broker)

    def _broker_ended(self, _: Fault) -> tuple[str, Callable[[], object]]:
        self.topology.broker.end()
        return "", self.topology.broker.start

    def _broker_alarm(self, _: Fault) -> tuple[str, Callable[[], object]]:
        stack = ExitStack()
        stack.enter_context(self.topology.broker.alarm())
        return "", stack.close

    def _server_hangs(self, _: Fault) -> tuple[str, Callable[[], object]]:
        self.topology.server.pause()
        return "", self.topology.server.resume

    def _read_only(self, _: Fault) -> tuple[str, Callable[[], object]]:
        read_only(self.topology.server)
        return "", lambda: self.redis.replicaof("NO", "ONE")

    def _out_of_memory(self, _: Fault) -> tuple[str, Callable[[], object]]:
        self.redis.config_set("maxmemory-policy", "noeviction")
        self.redis.config_set("maxmemory", 1)
        return "", lambda: self.redis.config_set("maxmemory", 0)

    def _slot(self, fault: Fault) -> Slot:
        if fault.whom != "the leader":
            return self.slots[fault.whom]
        beats = [self.slots[process.name] for process in self.plan.beats]
        return next((slot for slot in beats if self._leads(slot)), beats[0])

    def _leads(self, beat: Slot) -> bool:
        if beat.given.is_bare:
            return bool(beat.process.matches("beat: Acquired lock"))  # RedBeat's beat ends when it loses the lock
        with suppress(RedisError):
            return self.redis.hget(f"{self.topology.prefix}:leader", "pid") == str(beat.process.pid)
        return False

    def _down(self, fault: Fault, end: Callable[[CeleryProcess], object]) -> tuple[str, Callable[[], object]]:
        slot = self._slot(fault)
        slot.is_down = True
        process = slot.process
        process.resume()
        end(process)

        def start() -> None:
            # A warm shutdown ends the runs first; a process that does not end is found by the check of ends.
            if process.returncode is None:
                self._at(self._elapsed + 0.2, start_or_give_up)
            else:
                self._start(slot)

        deadline = time.monotonic() + fault.seconds + 40

        def start_or_give_up() -> None:
            if process.returncode is None and time.monotonic() > deadline:
                self.records.exits.append(Exit(time.time(), slot.name, None, _where(process)))
                process.kill_group()
            start()

        return slot.name, start

    def _beat_killed(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._down(fault, CeleryProcess.kill_group)

    _worker_host_lost = _beat_killed

    def _worker_killed(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._down(fault, CeleryProcess.kill)

    def _beat_ended(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._down(fault, CeleryProcess.terminate)

    _worker_warm = _beat_ended

    def _beat_upgraded(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        self._slot(fault).release = self.plan.releases[1]
        return self._beat_ended(fault)

    _worker_upgraded = _beat_upgraded

    def _worker_cold(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._down(fault, lambda process: process.send(signal.SIGQUIT))

    def _beats_killed(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        return self._all_down(fault, self.plan.beats, CeleryProcess.kill_group)

    def _handed_over(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        """End all beats of the kind that leads: one of the other kind leads next."""
        leads = self._slot(replace(fault, whom="the leader")).given.is_bare
        beats = [process for process in self.plan.beats if process.is_bare == leads]
        return self._all_down(fault, beats, CeleryProcess.terminate)

    def _all_down(
        self, fault: Fault, beats: Sequence[Process], end: Callable[[CeleryProcess], object]
    ) -> tuple[str, Callable[[], object]]:
        starts = [self._down(replace(fault, whom=process.name), end)[1] for process in beats]
        return "", lambda: [start() for start in starts]

    def _beat_stopped(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        slot = self._slot(fault)
        slot.process.send(signal.SIGSTOP, group=True)
        return slot.name, slot.process.resume

    _worker_stopped = _beat_stopped

    def _beat_starved(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        slot = self._slot(fault)
        pid, process = slot.process.pid, slot.process
        self._starved.add(pid)

        def feed() -> None:
            self._starved.discard(pid)
            time.sleep(2 * STANDS)
            process.resume()

        return slot.name, feed

    _worker_starved = _beat_starved

    def _delivered_again(self, _: Fault) -> tuple[str, Callable[[], object]]:
        self.messages.read()
        with suppress(RedisError):
            self.topology.broker.client().rpush("celery", *self.messages.acknowledged()[-20:])
        return "", lambda: None

    # ---------------------------------------------------------------- is it named

    def _ask(self, fault: Fault, happened: Happened) -> None:
        conf = {**self.conf, **self.topology.urls("operator")}
        env = {**os.environ, "SB_FIELD_CONF": json.dumps(conf), "PYTHONPATH": str(ROOT)}
        path = self.directory / f"doctor{next(self._numbers)}"
        with path.open("wb") as out:
            command = [sys.executable, "-m", "celery", "-A", "tests.field.tasks", "singlebeat", "doctor", "--json"]
            self._doctors.append((_spawn(command, stdout=out, env=env, cwd=self.directory), path, fault, happened))

    def _scrape(self, fault: Fault, happened: Happened) -> None:
        """Read the metrics of all processes, each from a thread: one that stands still does not answer."""
        naming = Naming(str(fault), fault.kind, happened.whom, "metrics", "")
        self.records.namings.append(naming)

        def read(slot: Slot) -> None:
            with suppress(OSError):
                url = f"http://127.0.0.1:{slot.metrics_port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as reply:
                    lines = reply.read().decode().splitlines()
                naming.is_late |= happened.ended < float("inf")  # a busy machine answers late
                shown = [f"{slot.name} {line}" for line in lines if not re.search(r"^#|_created|_bucket", line)]
                naming.text += "\n".join(shown) + "\n"

        for slot in self.slots.values():
            if not slot.is_down:
                threading.Thread(target=read, args=(slot,), daemon=True).start()

    def _read_logs(self, fault: Fault, happened: Happened, positions: Mapping[str, tuple[CeleryProcess, int]]) -> None:
        texts = []
        for name, slot in self.slots.items():
            process, position = positions.get(name, (None, 0))
            after = position if process is slot.process else 0
            texts += [f"{name} {line}" for line in slot.process.lines[after:] if " event=" in line]
        self.records.namings.append(Naming(str(fault), fault.kind, happened.whom, "log", "\n".join(texts)))

    # ---------------------------------------------------------------- entries

    def _rules_begin(self) -> datetime:
        if self.records.bare:
            # RedBeat computes each time of a rule from its first one on: a second's rule of 1971 takes it minutes.
            return datetime.now(UTC).replace(second=0, microsecond=0)
        return datetime.fromtimestamp(0, UTC) + timedelta(days=365)

    def _schedule_of(self, given: Given, every: float) -> Any:
        if given.calendar == "rrule":
            return rrule("SECONDLY", interval=int(every), dtstart=self._rules_begin())
        return crontab() if given.calendar == "crontab" else schedule(timedelta(seconds=every))

    def _put(self, given: Given, entries: Schedule | None = None, every: float = 0.0) -> None:
        wishes = {"overlap": given.overlap}
        if given.grace is not None:
            wishes["misfire_grace_time"] = given.grace
        task = f"{tasks.NAME}.{given.task}"
        timing = self._schedule_of(given, every or given.every)
        args = [f"entry {given.name}", *([1] if given.task == "merge" else []), given.seconds]
        self._edited("put", given.name, every or given.every, entries or Schedule(self.setup),
                     lambda entries: entries.upsert(given.name, task, timing, args=args, **wishes))  # fmt: skip

    def _edited(self, kind: str, name: str, every: float, entries: Schedule, do: Callable[[Schedule], object]) -> None:
        """Do it until it is done, and note in which time it was done: an error may come after the deed."""
        began = time.time()
        edited = Edited(kind, name, every, began)
        self.records.edits.append(edited)
        while not self._ends.is_set():
            try:
                do(entries)
            except KeyError:  # deleted before: by an attempt whose reply was lost
                break
            except (RedisError, SinglebeatError, OSError) as error:
                edited.errors += 1
                edited.error = f"{type(error).__name__}: {error}"[:200]
                self._ends.wait(0.5)
            else:
                break
        edited.ended = time.time()

    def _edit(self, edit: Edit) -> None:
        threading.Thread(target=self._do_edit, args=(edit,), daemon=True).start()

    def _do_edit(self, edit: Edit) -> None:
        given = next(given for given in self.plan.entries if given.name == edit.entry)
        entries = Schedule(self.operator)
        with self._edits:  # one after the other, as planned
            if edit.kind == "put_again":
                self._edited("delete", given.name, 0, entries, lambda entries: entries.delete(given.name))
                self._put(given, entries, edit.every)
            elif edit.kind == "reschedule":
                self._put(given, entries, edit.every)
            elif edit.kind == "backfill":
                end = datetime.now(UTC) - timedelta(seconds=2)
                self._edited("backfill", given.name, 0, entries,
                             lambda entries: entries.backfill(given.name, end - timedelta(seconds=8), end))  # fmt: skip
                self.records.edits[-1].until = end.timestamp()
            else:
                self._edited(edit.kind, given.name, 0, entries,
                             lambda entries: getattr(entries, edit.kind)(given.name))  # fmt: skip

    # ---------------------------------------------------------------- rest

    def _settle(self) -> None:
        """Let the fleet come to rest, and note the state then."""
        self._agenda = [item for item in self._agenda if item[0] < float("inf")]
        deadline = time.monotonic() + 60
        while any(slot.is_down for slot in self.slots.values()) and time.monotonic() < deadline:
            self._work_off(self._elapsed + 0.5)
        self._end_redbeat()  # before the edits: a backfill waits for the one before it
        with self._edits:
            pass
        for process in self.plan.workers:
            self.slots[process.name].process.ready(timeout=60)
            self._send_probe(process.name)
        self._work_off(self._elapsed + 3)
        self.records.deleted = time.time()
        entries = Schedule(self.setup)
        for given in self.plan.entries:
            self._edited("delete", given.name, 0, entries, lambda entries, name=given.name: entries.delete(name))
        self.sender.terminate()
        self.sender.wait()
        self._agenda.clear()
        self.say(f"{self._elapsed:7.1f} s all entries are deleted: {self._unfinished()}")
        deadline = time.monotonic() + REST
        while (left := self._unfinished()) and time.monotonic() < deadline:
            time.sleep(0.2)
            self._check_exits()
        self.records.unfinished = left
        self.say(f"{self._elapsed:7.1f} s all messages have run; locks: {self._held()}")
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(0.5)
            if all(lock["state"] != "running" for lock in held.values()):
                break
        self.records.locks = held
        self.records.keys = self.redis.dbsize()
        wait_until(lambda: self._check_exits() or not self._doctors, timeout=60, what="the last doctor")
        self.say(f"{self._elapsed:7.1f} s at rest")
        self._stop_fleet()
        self._collect()
        self.say(f"{self._elapsed:7.1f} s ended")

    def _end_redbeat(self) -> None:
        """End a beat of RedBeat beside others: what waits for a leader of singlebeat would wait on."""
        if all(process.is_bare for process in self.plan.beats):
            return
        for slot in self.slots.values():
            if slot.given in self.plan.beats and slot.given.is_bare:
                slot.is_down = True
                slot.process.terminate()

    def _unfinished(self) -> str:
        self.messages.read()
        self.journal.read()
        waiting, pending, runs = (
            self.messages.waiting(),
            self.redis.zcard(f"{self.topology.prefix}:pending"),
            self.watch.open(),
        )
        if not (waiting or pending or runs):
            return ""
        return f"{waiting} messages, {pending} pending, runs of {', '.join(run.name for run in runs)}"

    def _held(self) -> dict[str, dict[str, str]]:
        held = {}
        for key in self.redis.scan_iter("SINGLETONLOCK_*", _type="hash"):
            held[key] = {**self.redis.hgetall(key), "pttl": str(self.redis.pttl(key))}
        return {key: lock for key, lock in held.items() if "state" in lock}

    def _stop_fleet(self) -> None:
        for slot in self.slots.values():
            slot.is_down = True
            slot.process.terminate()
        for slot in self.slots.values():
            try:
                code = slot.process.wait(40)
            except AssertionError:
                self.records.exits.append(Exit(time.time(), slot.name, None, _where(slot.process)))
            else:
                if code:
                    self.records.exits.append(Exit(time.time(), slot.name, code, slot.process.tail(30)))

    def _collect(self) -> None:
        self.journal.read()
        self.messages.read()
        records = self.records
        records.ended = time.time()
        records.decisions, records.ends = self.journal.decisions, self.journal.ends
        records.redbeat_led = self.journal.redbeat_led
        records.messages = self.messages.messages
        records.runs = sorted(self.watch.runs.values(), key=lambda run: run.started)
        calls: dict[str, Call] = {}
        for id_, call in self.observer.client().xrange(CALLS):
            at = int(id_.partition("-")[0]) / 1000
            if call["event"] == "begin":
                calls[id_] = Call(at, call["task"], call["name"], int(call["number"]))
            else:
                of = calls[call["of"]]
                of.ended, of.id = at, call.get("id", "")
                of.is_duplicate, of.error = call.get("duplicate") == "1", call.get("error", "")
        records.calls = list(calls.values())
        records.logs = {
            name: [line for process in slot.history for line in process.lines] for name, slot in self.slots.items()
        }


def _where(process: CeleryProcess) -> str:
    """Return the last lines of the log of a process, with the stacks of its threads if it is a worker."""
    with suppress(ProcessLookupError):
        process.send(signal.SIGUSR1)  # Celery's workers log all stacks then
        time.sleep(2)
    return process.tail(300)


def _status(pid: int | str) -> Mapping[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def _memory(status: Mapping[str, str]) -> int:
    return int(status["VmRSS"].split()[0]) * 1024


@contextmanager
def open_bed(plan: Plan, **options: Any) -> Iterator[Bed]:
    """Open a bed for a plan."""
    with Bed(plan, **options) as bed:
        yield bed
