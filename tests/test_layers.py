"""What each layer may import. The table is the architecture; docs/architecture.md explains it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trio_engine

PACKAGE = Path(trio_engine.__file__).parent

# Top-level modules that hold no logic of a layer and import nothing heavy: everybody's.
SHARED = {"__version__", "errors", "config", "outputs", "requests", "sampling_params", "tensors"}

# layer -> the other layers that it may import, apart from SHARED and itself.
ALLOWED: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "config": set(),
    "tensors": set(),
    "sampling_params": set(),
    "requests": set(),
    "outputs": set(),
    "engine_arguments": set(),
    "checkpoint": set(),
    "gguf_metadata": set(),
    "wire": set(),
    "core": set(),
    "text": {"checkpoint", "gguf_metadata"},
    "executor": {"core.plan", "structured"},
    "executor.torch_executor": {"core.plan", "checkpoint", "model"},
    "model": {"core.plan", "checkpoint", "gguf_metadata", "structured"},
    "structured": {"core.plan", "checkpoint", "text"},
    "transport": {"wire"},
    "engine": {
        "core",
        "wire",
        "transport",
        "structured",
        "executor.base",
        "observability.trace",
    },
    "engine.__main__": {"cli"},
    "client": {
        "wire",
        "transport",
        "text",
        "checkpoint",
        "core.statistics",
        "engine_arguments",
        "observability",
    },
    "client.inproc_client": {
        "wire",
        "text",
        "checkpoint",
        "core",
        "engine",
        "executor.base",
        "observability.trace",
    },
    "observability": set(),
    "observability.trace": {"core.step_phases"},
    "bench": {"client", "core.statistics", "wire"},
    "testing": {
        "wire",
        "transport",
        "core",
        "engine",
        "executor",
        "structured",
        "client",
        "text",
    },
    "testing.check_engine": {"__main__", "client", "testing"},
    "cli": {
        "bench",
        "client",
        "text",
        "engine",
        "executor",
        "engine_arguments",
        "observability",
        "checkpoint",
    },
    "__main__": {"cli", "engine"},
}

# What these foreign packages may be imported by; others are free.
FOREIGN: dict[str, set[str]] = {
    "zmq": {"transport"},
    "trio": {"transport", "engine", "client", "testing", "cli", "bench"},
    "torch": {"model", "executor.torch_executor"},
    "safetensors": {"model"},
    "gguf": {"model", "gguf_metadata"},
    "llguidance": {"structured"},
    "tokenizers": {"text", "testing"},
    "jinja2": {"text"},
}


def layer_of(module: str) -> str:
    """The most exact key of ALLOWED for a module named below the package."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in ALLOWED:
            return ".".join(parts[:end])
    return ""


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, those in functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found.add(module)
            if module.startswith("trio_engine"):
                found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def modules() -> list[tuple[str, Path]]:
    """Every module of the package by its name below the package."""
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("")
        named.append((".".join(relative.parts).removesuffix("__init__").rstrip("."), path))
    return named


@pytest.mark.parametrize(("module", "path"), modules())
def test_module_imports_only_what_its_layer_may(module: str, path: Path) -> None:
    if module == "":
        return  # the lazy table of public names, checked below
    layer = layer_of(module)
    assert layer, f"{module} belongs to no layer of the table"
    family = layer.split(".")[0]
    for name in imports_of(path):
        if name.startswith("trio_engine."):
            target = name.removeprefix("trio_engine.")
            if target.split(".")[0] in SHARED | {family}:
                continue
            allowed = any(target == a or target.startswith(f"{a}.") for a in ALLOWED[layer])
            is_name_of_allowed = any(a.startswith(f"{target}.") for a in ALLOWED[layer])
            assert allowed or is_name_of_allowed, f"{module} imports {name}"
        elif name.split(".")[0] in FOREIGN:
            permitted = FOREIGN[name.split(".")[0]]
            assert family in permitted or layer in permitted, f"{module} imports {name}"


def test_every_layer_of_the_table_exists() -> None:
    names = {module for module, _ in modules()}
    for layer in ALLOWED:
        assert any(name == layer or name.startswith(f"{layer}.") for name in names), layer


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("trio_engine", {"trio", "zmq", "torch", "msgspec", "numpy"}),
        ("trio_engine.core.engine_core", {"trio", "zmq", "torch"}),
        ("trio_engine.wire.handshake", {"trio", "zmq", "torch"}),
        ("trio_engine.text.processor", {"trio", "zmq", "torch"}),
        ("trio_engine.executor.torch_executor", {"torch"}),
        ("trio_engine.engine.engine_core_proc", {"torch", "tokenizers", "llguidance"}),
        ("trio_engine.client.launcher", {"torch"}),
        ("trio_engine.testing", {"torch", "zmq", "pytest"}),
        ("trio_engine.testing.check_client", {"torch", "zmq"}),
        ("trio_engine.testing.check_engine", {"torch"}),
        ("trio_engine.testing.check_executor", {"torch", "zmq"}),
        ("trio_engine.testing.fake_engine", {"torch", "zmq"}),
        ("trio_engine.testing.wire_faults", {"torch", "zmq"}),
    ],
)
def test_importing_a_module_loads_nothing_that_it_must_not(
    module: str, forbidden: set[str]
) -> None:
    code = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.split() == []


def test_public_names_are_those_that_the_package_promises() -> None:
    for name in trio_engine.__all__:
        assert getattr(trio_engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trio_engine.nonsense
