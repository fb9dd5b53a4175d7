"""The page: how long its server computes, and the memory of its process after many requests."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial

from starlette.testclient import TestClient

from singlebeat import web
from tests.benchmarks.apps import PLAIN
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.memory import megabytes
from tests.benchmarks.pages import store_with_past
from tests.benchmarks.processes import celery, rss
from tests.benchmarks.stage import Stage
from tests.support import free_port, wait_until

#: Each view by its label; the first is what the others are compared with.
VIEWS = {
    "first page": "/",
    "search, none matches": "/?q=nothing",
    "search, all match": "/?q=plain",
    "paused, none is": "/?state=paused",
    "by last end": "/?sort=last",
    "one entry": "/entry?name=e7",
    "history": "/history",
}


def cases(stage: Stage) -> list[Case]:
    stored, records = stage.size(100_000, quick=1_000), stage.size(1_000_000, quick=2_000)
    requests = stage.size(10_000, quick=200)
    about = f"{stored:,} entries, with {records:,} ends of runs and as many decisions"
    return [
        Case(
            "web",
            f"The page's answers to the first viewer: {about}",
            partial(_views, stage, stored, records),
            "≤ 150 ms; with a search ≤ 400 ms",
        ),
        Case(
            "web-memory",
            f"Memory (RSS) of the page's process after {requests:,} requests by that after a tenth of them",
            partial(_memory, stage, stored, records, requests),
            "1",
            show="{:.3f}".format,
            rounds=1,
            warm_up=False,
            compare=False,
        ),
    ]


@contextmanager
def _views(stage: Stage, stored: int, records: int) -> Iterator[Mapping[str, Side]]:
    entries = store_with_past(stage, stored, records)
    with TestClient(web.app(entries.app), client=("127.0.0.1", 50_000), base_url="http://localhost") as page:
        poller = page.app.state.site.board.poller

        def answer(path: str) -> None:
            if page.get(path).status_code != 200:
                raise RuntimeError(f"the page does not answer {path}: this measures nothing")

        def side(path: str) -> float:
            poller.forget()  # what it has read for an earlier viewer
            return timed(partial(answer, path))

        yield {label: partial(side, path) for label, path in VIEWS.items()}


@contextmanager
def _memory(stage: Stage, stored: int, records: int, requests: int) -> Iterator[Mapping[str, Side]]:
    entries = store_with_past(stage, stored, records)
    port = free_port()
    conf = {"redbeat_key_prefix": entries.app.conf.redbeat_key_prefix}
    command = "singlebeat", "web", "--port", str(port)
    with celery(stage, *command, tasks=(PLAIN,), conf=conf) as process:
        wait_until(partial(_answers, port), timeout=60, what="the page")

        def side() -> float:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                get = partial(_get, connection)
                for number in range(requests // 10):
                    get(_path(number))
                before = rss(process)
                for number in range(requests // 10, requests):
                    get(_path(number))
                after = rss(process)
                print(f"{megabytes(before)}, then {megabytes(after)}")  # noqa: T201 - a benchmark prints
                return after / before

        yield {"the page": side}


def _path(number: int) -> str:
    """Return a path that was not asked for before: what a process keeps of each would grow."""
    paths: list[Callable[[int], str]] = [
        lambda number: f"/entry?name=e{number}",
        lambda number: f"/?q=e{number}&n={number}" if number % 50 == 1 else f"/static/page.css?{number}",
        lambda number: f"/history?name=e{number}",
        lambda number: f"/entry?name=none{number}",
    ]
    return paths[number % len(paths)](number)


def _answers(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException), closing(http.client.HTTPConnection("127.0.0.1", port)) as each:
        return _get(each, "/static/page.css") == 200
    return False


def _get(connection: http.client.HTTPConnection, path: str) -> int:
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    return answer.status
