"""What holds wherever the page is mounted, and a WSGI server for hosts."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        """Log nothing."""

    def get_environ(self):
        """Return the environment with the client's port, without which a2wsgi takes over no address of a client."""
        return {**super().get_environ(), "REMOTE_PORT": str(self.client_address[1])}


@contextmanager
def served_by_wsgi(application: Any) -> Iterator[str]:
    """Serve a WSGI application over HTTP, and yield its address."""
    server = make_server("127.0.0.1", 0, application, handler_class=_Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check_mounted(browser: Any, prefix: str, *, token: str = "singlebeat_token") -> None:
    """Check links, static files, forms and redirects below a prefix; pauses the entry ``e``.

    Args:
        browser: an HTTP client of a user who may do everything.
        token: name of the hidden field of a form that holds its token.
    """
    seen, left = set[str](), {f"{prefix}/"}
    while left:
        seen |= left
        found = set[str]()
        for link in sorted(left):
            shown = browser.get(link, params={"name": "e", "do": "pause"})
            assert shown.status_code in {200, 409}, (link, shown.status_code)  # 409: no beat leads, no lock is held
            if "html" in shown.headers["content-type"]:
                links = re.findall(r'(?:href|src|hx-get)="([^"#?]+)', shown.text)
                found |= {each for each in links if not each.startswith("data:")}
                actions = re.findall(r'action="([^"#?]+)', shown.text)
                assert [each for each in [*links, *actions] if not each.startswith((f"{prefix}/", "data:"))] == [], link
        left = found - seen
    assert {f"{prefix}/static/page.css", f"{prefix}/static/page.js", f"{prefix}/history"} <= seen
    form = browser.get(f"{prefix}/pause", params={"name": "e"}).text
    (value,) = {*re.findall(rf'name="{token}" value="([^"]+)"', form)}
    done = browser.post(f"{prefix}/pause", data={token: value, "name": "e"}, follow_redirects=False)
    assert (done.status_code, done.headers["location"]) == (303, f"{prefix}/entry?name=e&done=paused")
    assert browser.get(done.headers["location"]).status_code == 200
    assert browser.get(f"{prefix}/api/openapi.json").json()["servers"] == [{"url": f"{prefix}/api"}]
    assert browser.get(f"{prefix}/api/entry", params={"name": "e"}).json()["state"] == "paused"
    assert browser.get(f"{prefix}/api/none").status_code == 404
