"""Generates `tandem/v1/` from `proto/`; with `--check`, fails when the stubs in the tree are not what it would write.

    python scripts/gen_proto.py [--check]

The generated code states the oldest `protobuf` and `grpcio` it runs with, so the tools are pinned in the `dev` extra
and the two floors in `pyproject.toml` follow them.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
PACKAGE = Path("tandem/v1")


def generate(out: Path) -> None:
    """Writes the stubs below `out`, as `tandem/v1/*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi`."""
    includes = Path(grpc_tools.__file__).parent / "_proto"
    schemas = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    outputs = [f"--{name}_out={out}" for name in ("python", "pyi", "grpc_python")] + [f"--mypy_grpc_out=quiet:{out}"]
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"  # this environment's, whatever PATH says
    code = protoc.main(
        ["protoc", f"-I{PROTOS}", f"-I{includes}", f"--plugin=protoc-gen-mypy_grpc={plugin}", *outputs, *schemas]
    )
    if code:
        raise SystemExit(code)


def read(root: Path) -> dict[str, bytes]:
    """The stubs below `root`, by file name."""
    return {path.name: path.read_bytes() for path in sorted((root / PACKAGE).glob("*_pb2*.py*"))}


def stale(tree: dict[str, bytes], fresh: dict[str, bytes]) -> list[str]:
    return sorted(name for name in tree.keys() | fresh.keys() if tree.get(name) != fresh.get(name))


def write(files: dict[str, bytes], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*_pb2*.py*"):
        old.unlink()
    for name, text in files.items():
        (out / name).write_bytes(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail when the stubs are stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = read(Path(scratch))
    names = stale(read(ROOT), fresh)
    if check and names:
        print(f"stale: {', '.join(names)}; run `python scripts/gen_proto.py` and commit", file=sys.stderr)
        return 1
    if names:
        write(fresh, ROOT / PACKAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
