"""An unmodified ``vllm serve`` and the engine behind it, in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from tests.interop.open_ai_client import OpenAIClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

START_TIMEOUT_S = 300.0
"""vLLM's imports alone take a minute where two cores do other work as well."""

EXIT_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.2

MODEL = "served"
MAX_MODEL_LEN = 256
"""Short, so that the longest prompt is computed in a moment."""

LIMITS = (f"--max-model-len={MAX_MODEL_LEN}", "--dtype=float32")

# The second is for commands that steer the engine; nothing is fetched and nobody is told.
_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class LoggedProcess:
    """A process with its children, and what they wrote."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=log.parent,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> int:
        """Asks it to stop; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Waits for its end; its exit status."""
        return self._process.wait(EXIT_TIMEOUT_S)

    def kill(self) -> None:
        """Ends it and its children, if they still run."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ServedEngine:
    """Both processes.

    Attributes:
        client: to ask the front end.
        front_end: vLLM's process.
        engine: ours.
    """

    def __init__(
        self, client: OpenAIClient, front_end: LoggedProcess, engine: LoggedProcess
    ) -> None:
        self.client = client
        self.front_end = front_end
        self.engine = engine

    def wait_healthy(self) -> None:
        """Returns when requests are served.

        Raises:
            AssertionError: one of the two has ended, or it takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(ConnectionError):
                self.client.get("/health")
                return
            for process in (self.front_end, self.engine):
                assert process.is_running, process.log[-4000:]
            assert time.monotonic() < deadline, self.front_end.log[-4000:]
            time.sleep(POLL_INTERVAL_S)  # nothing tells when another's port is bound


def engine_command(model: Path) -> list[str]:
    """This engine on a model folder, as a user starts it."""
    command = [sys.executable, "-m", "trio_engine", "engine", "--headless"]
    return [*command, f"--model={model}", *LIMITS, f"--handshake-timeout={START_TIMEOUT_S:g}"]


@contextmanager
def open_served_engine(
    python: str, model: Path, logs: Path, engine: Sequence[str]
) -> Iterator[ServedEngine]:
    """Starts a front end and an engine, and waits until they serve.

    Args:
        python: an interpreter with vLLM.
        model: a Hugging Face folder for the front end.
        logs: a folder for what they write.
        engine: its command, without the front end's address.
    """
    http_port, handshake_port = _free_ports(2)
    front_end_command = [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *LIMITS),
        *("--host=127.0.0.1", f"--port={http_port}", f"--served-model-name={MODEL}"),
        *("--data-parallel-size=1", "--data-parallel-size-local=0"),
        *("--data-parallel-address=127.0.0.1", f"--data-parallel-rpc-port={handshake_port}"),
    ]
    address = f"--handshake-address=tcp://127.0.0.1:{handshake_port}"
    with ExitStack() as stack:
        front_end = LoggedProcess(front_end_command, logs / "front_end.log", _VLLM_ENVIRONMENT)
        stack.callback(front_end.kill)
        process = LoggedProcess([*engine, address], logs / "engine.log", {})
        stack.callback(process.kill)
        served = ServedEngine(OpenAIClient(http_port, MODEL), front_end, process)
        served.wait_healthy()
        yield served


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [probe.getsockname()[1] for probe in probes]
