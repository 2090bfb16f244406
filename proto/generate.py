"""Generates the protobuf modules beside the .proto files, or checks that the committed ones are up to date.

    python proto/generate.py           write the modules
    python proto/generate.py --check   exit 1 and say what differs, without writing anything

The generator is grpcio-tools of the version the dev extra pins; another version writes other files.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
DIFF_LINES = 20  # Of each file: enough to see whether a .proto or the generator changed.


class GenerationError(RuntimeError):
    """The compiler refused the .proto files; its own message went to stderr."""


def generate(proto_root: Path, out: Path) -> None:
    """Compiles every .proto file below `proto_root` into modules below `out`, at the same relative paths.

    Raises:
        GenerationError: There is nothing to compile, or it doesn't compile.
    """
    sources = sorted(str(path.relative_to(proto_root)) for path in proto_root.rglob("*.proto"))
    if not sources:
        raise GenerationError(f"no .proto files below {proto_root}")
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"--proto_path={proto_root}",
        f"--proto_path={well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise GenerationError("protoc failed; what it says stands above")


def differences(proto_root: Path) -> list[str]:
    """Compares the modules below `proto_root` with freshly generated ones.

    Returns:
        A line for each missing or left-over file and the head of a diff for each that differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh_root = Path(folder)
        generate(proto_root, fresh_root)
        fresh = _modules(fresh_root)
        committed = _modules(proto_root)
    found = [f"missing: {name}" for name in sorted(fresh.keys() - committed.keys())]
    found += [f"left over: {name}" for name in sorted(committed.keys() - fresh.keys())]
    for name in sorted(fresh.keys() & committed.keys()):
        diff = list(
            difflib.unified_diff(
                committed[name].splitlines(),
                fresh[name].splitlines(),
                f"committed/{name}",
                f"generated/{name}",
                lineterm="",
                n=1,
            )
        )
        found += diff[:DIFF_LINES]
        if len(diff) > DIFF_LINES:
            found.append(f"... and {len(diff) - DIFF_LINES} lines more")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the protobuf modules of batond.v1.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if anything differs")
    check = parser.parse_args(arguments).check
    try:
        if not check:
            generate(PROTO_ROOT, PROTO_ROOT)
            return 0
        found = differences(PROTO_ROOT)
    except GenerationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if found:
        sys.stderr.write("\n".join([*found, "Generated modules differ; run `make proto` and commit.", ""]))
        return 1
    return 0


def _modules(root: Path) -> dict[str, str]:
    """Reads the generated modules below `root`; the keys are relative paths."""
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for pattern in PATTERNS
        for path in root.rglob(pattern)
    }


if __name__ == "__main__":
    sys.exit(main())
