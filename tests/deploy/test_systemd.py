"""The units of the deployment kit, and what a beat reports to systemd."""

from __future__ import annotations

import configparser
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from singlebeat.beat.leadership import service_manager
from singlebeat.beat.leadership.service_manager import ServiceManager
from singlebeat.config import Config
from tests.deploy.conftest import KIT

UNITS = sorted((KIT / "systemd").glob("*.service"))

#: Of 100; ``systemd-analyze`` calls less than 20 OK, and it rates a unit without hardening with 96.
MOST_EXPOSURE = 20


class Socket:
    """The socket of systemd."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(30)

    def next(self) -> list[str]:
        return self._socket.recv(1024).decode().split("\n")

    def is_empty(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(1024)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(30)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path) -> Iterator[Socket]:
    address = f"@singlebeat-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    listening = Socket(address)
    yield listening
    listening.close()


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(KIT / "systemd" / f"shop-{name}.service")
    return parser["Service"]


def test_a_beat_reports_that_it_is_ready_works_and_stops(shop, shop_directory, tmp_path, redis):
    systemd = Socket(str(tmp_path / "notify"))
    redis.set("redbeat::lock", "another", px=60_000)
    beat = shop(unit("beat")["ExecStart"], NOTIFY_SOCKET=systemd.address)

    assert systemd.next() == ["READY=1", "WATCHDOG=1"]
    beat.wait_for("Standing by")
    assert systemd.next() == ["WATCHDOG=1"], "a standby works, too"
    redis.delete("redbeat::lock")
    beat.wait_for("this beat leads")
    while not systemd.is_empty():  # of the standby
        pass
    assert systemd.next() == ["WATCHDOG=1"]
    beat.terminate()
    while (report := systemd.next()) == ["WATCHDOG=1"]:
        pass
    assert report == ["STOPPING=1"]
    assert beat.wait() == 0
    assert systemd.is_empty()
    assert [path.name for path in shop_directory.iterdir()] == ["shop.py"], "a unit may write nowhere"
    systemd.close()


def test_progress_is_reported_once_a_second_at_most(systemd, monkeypatch):
    times = iter((100.0, 100.5, 100.9, 101.0, 101.5))
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: next(times))
    manager = ServiceManager(systemd.address)

    for _ in range(5):
        manager.progress()

    assert (systemd.next(), systemd.next()) == (["READY=1", "WATCHDOG=1"], ["WATCHDOG=1"])
    assert systemd.is_empty()


def test_a_process_that_was_never_ready_reports_no_end(systemd):
    ServiceManager(systemd.address).stop()

    assert systemd.is_empty()


def test_nothing_is_reported_after_the_end(systemd):
    manager = ServiceManager(systemd.address)
    manager.progress()
    manager.stop()

    manager.stop()
    manager.progress()

    assert (systemd.next(), systemd.next()) == (["READY=1", "WATCHDOG=1"], ["STOPPING=1"])
    assert systemd.is_empty()


def test_a_full_socket_blocks_no_tick(systemd):
    sender = ServiceManager(systemd.address)

    for _ in range(1000):
        sender._send("WATCHDOG=1")


def test_a_socket_that_is_gone_harms_no_tick(tmp_path):
    ServiceManager(str(tmp_path / "gone")).progress()


def test_systemd_waits_longer_than_the_watchdog_of_beat():
    """Beat logs all stacks; systemd only kills."""
    default = Config().singlebeat_watchdog_timeout

    assert unit("beat").getfloat("WatchdogSec") > default
    assert unit("beat")["Type"] == "notify"


@pytest.fixture
def installed(tmp_path) -> Path:
    """The units as they are installed, with the program that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    directory = tmp_path / "system"
    shutil.copytree(KIT / "systemd", directory)
    program = Path(sysconfig.get_path("scripts"), "celery")
    for path in directory.glob("*.service"):
        path.write_text(path.read_text("utf-8").replace("/srv/shop/.venv/bin/celery", str(program)), "utf-8")
    return directory


def analyze(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *args],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{directory}:"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", [path.name for path in UNITS])
def test_systemd_accepts_a_unit_and_its_hardening(installed, name):
    verified = analyze(installed, "verify", str(installed / name))
    rated = analyze(installed, "security", "--offline=true", f"--threshold={MOST_EXPOSURE}", str(installed / name))

    assert (verified.returncode, verified.stderr) == (0, "")
    assert rated.returncode == 0, rated.stdout
