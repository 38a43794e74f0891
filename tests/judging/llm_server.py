"""A local server with the chat API of OpenAI, that answers correctly and fails as real ones do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from judging.conftest import answers


class Server(ThreadingHTTPServer):
    """Counts what it was asked, and fails by the plan: for each number of the request, what happens."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.paid: list[str] = []
        self.keys: list[str | None] = []
        self.plan: dict[int, str] = {}
        self.never: tuple[str, ...] = ()  # documents for which there is never a grade
        self.delay = 0.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(prompt)
            self.server.keys.append(self.headers.get("Authorization"))
        time.sleep(self.server.delay)
        kind = self.server.plan.get(number, "")
        query, document = (prompt.split(f"{name}: ")[1].split("\n")[0] for name in ("Query", "Document"))
        grade = 3 if answers(query, document) else 1
        text = f'{{"grade": {grade}}}' if number % 3 else f"Grade: {grade}."
        if kind == "hang":
            time.sleep(1.5)
        elif kind.isdigit():
            return self._reply(int(kind), b"{}", {"Retry-After": "0"} if kind == "429" else {})
        elif kind == "garbage":
            return self._reply(200, b"<html>not JSON", {})
        elif kind == "empty":
            return self._reply(200, b'{"choices": []}', {})
        elif kind == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices')
            self.close_connection = True
            return None
        elif kind == "chat" or any(document == one for one in self.server.never):
            text = "It lies between 1 and 2, I think."
        with self.server.lock:
            self.server.paid.append(prompt)
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 6}
        answer = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
        return self._reply(200, json.dumps(answer).encode(), {})

    def _reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        try:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # a client that has given up
            self.close_connection = True


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
