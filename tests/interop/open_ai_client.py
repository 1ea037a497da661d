"""What an OpenAI-compatible server is asked over HTTP, and what it says."""

from __future__ import annotations

import json
import re
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_TIMEOUT_S = 120.0
"""Of silence. A step of the model on a busy machine takes well under a second."""

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Refusal(NamedTuple):
    """What came in place of an answer."""

    status: int
    message: str


class OpenAIClient:
    """One server on 127.0.0.1; every call has a connection of its own, so threads may share it."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def ask(self, path: str, **body: Any) -> Json:
        """The whole answer; greedy unless the body says otherwise.

        Raises:
            AssertionError: it was refused.
        """
        with self._posted(path, body) as response:
            text = response.read().decode()
            assert response.status == 200, f"{response.status}: {text}"
            answer: Json = json.loads(text)
            return answer

    def refusal(self, path: str, **body: Any) -> Refusal:
        """For what must not be served."""
        with self._posted(path, body) as response:
            text = response.read().decode()
            assert response.status != 200, f"it was served: {text}"
            return Refusal(response.status, json.loads(text)["error"]["message"])

    @contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[Iterator[Json]]:
        """The pieces of an answer as they come; leaving the block hangs up."""
        with self._posted(path, {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            yield _events(response)

    def post(self, path: str) -> None:
        """A command without a body."""
        with self._response("POST", path) as response:
            assert response.status == 200, response.read()

    def get(self, path: str) -> str:
        """The text under a path."""
        with self._response("GET", path) as response:
            text = response.read().decode()
            assert response.status == 200, text
            return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that have these labels."""
        values = [
            float(line.rpartition(" ")[2])
            for line in self.get("/metrics").splitlines()
            if re.match(rf"{re.escape(name)}[{{ ]", line)
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        ]
        assert values, f"there is no {name} with {labels}"
        return sum(values)

    @contextmanager
    def _posted(self, path: str, body: Json) -> Iterator[HTTPResponse]:
        whole = {"model": self._model, "temperature": 0, **body}
        with self._response("POST", path, json.dumps(whole)) as response:
            yield response

    @contextmanager
    def _response(self, method: str, path: str, body: str | None = None) -> Iterator[HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)
        with closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            # Its socket outlives the connection's where the server closes at the end.
            with closing(connection.getresponse()) as response:
                yield response


def _events(response: HTTPResponse) -> Iterator[Json]:
    for line in response:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line.removeprefix(b"data: "))
