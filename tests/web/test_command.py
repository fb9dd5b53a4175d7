"""The command that serves the page, as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

from tests.support import free_port, wait_until


def test_the_command_serves_the_page_until_it_is_told_to_end(server, redis, tmp_path):
    source = f"from celery import Celery\napp = Celery('shop', broker={server.celery_url!r})\n"
    (tmp_path / "shop.py").write_text(source)
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", "shop", "singlebeat", "web", "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"The page: http://127.0.0.1:{port}/\n"
            text = _get(f"http://127.0.0.1:{port}/")
            assert re.search(r'class="brand" [^>]*>singlebeat <small>shop</small>', text)
            assert "There is no entry yet" in text
        finally:
            process.terminate()
            process.wait(10)


def _get(url: str) -> str:
    def ask() -> str:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.read().decode()
        except ConnectionError:
            return ""
        except urllib.error.URLError as exc:
            if not isinstance(exc.reason, ConnectionError):
                raise
            return ""

    return wait_until(ask, what="the page")
