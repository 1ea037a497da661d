"""``python -m fuzz``: all targets for equal shares of a time, or one of them for all of it."""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
from pathlib import Path

from fuzz.runner import Runner
from fuzz.target import Input
from fuzz.targets import NAMES, load_target

_MEMORY_LIMIT_BYTES = 4 << 30
# For imports, seeds and the input that runs when the time is over, on a busy machine.
_HANG_GRACE_S = 300.0


def main() -> int:
    """Runs what the command line asks for; the exit status is 1 if an input failed."""
    options = parse()
    faulthandler.enable()
    _limit_memory()
    if options.atheris:
        return _run_atheris(options.target, options.seconds)
    # The runner stops an input that takes too long, but not a loop in C.
    faulthandler.dump_traceback_later(options.seconds + _HANG_GRACE_S, exit=True)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """As ``main``, without limits to the process."""
    runner = Runner(seed=options.seed)
    if options.files:
        inputs = [Input(str(path), path.read_bytes()) for path in options.files]
        runner.replay(load_target(options.target), inputs)
    else:
        targets = [load_target(name) for name in ([options.target] if options.target else NAMES)]
        for target in targets:
            runner.fuzz(target, options.seconds / len(targets))
    return 1 if runner.num_failed else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--target", choices=NAMES, help="run this one only")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage, if installed")
    parser.add_argument("files", nargs="*", type=Path, help="inputs to run instead of random ones")
    options = parser.parse_args(arguments)
    if options.target is None and (options.files or options.atheris):
        parser.error("--atheris and files need a --target")
    return options


def _run_atheris(name: str, seconds: float) -> int:
    """Hands over to libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["trio_engine"]):
        target = load_target(name)

    corpus = Path("fuzz/corpus", name)
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds()):
        (corpus / f"seed-{index}").write_bytes(seed.data)
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds:.0f}"], target.check)
    atheris.Fuzz()
    return 0


def _limit_memory() -> None:
    """An input that makes a decoder take all memory meets MemoryError, and no other process."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT_BYTES, hard))


if __name__ == "__main__":
    sys.exit(main())
