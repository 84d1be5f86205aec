"""The map of `docs/architecture.md`, kept true by reading the imports of every file. Nothing is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = {
    "engine": ("engine",),
    "kvtransfer": ("kvtransfer",),
    "tandem": ("tandem", "engine.types", "engine.errors", "engine.hashing"),
    "prefill_node": ("prefill_node", "tandem", "engine", "kvtransfer"),
    "decode_node": ("decode_node", "tandem", "engine", "kvtransfer"),
    "cluster": ("cluster", "prefill_node", "decode_node", "tandem", "engine", "kvtransfer"),
}
"""Room → what of ours it may import."""

WORKSHOPS = ("bench", "scripts", "tests")
"""May import any room; no room imports them."""

OWNERS = {
    "ray": ("cluster/actors.py", "cluster/ray_*.py"),
    "grpc": ("*_server.py", "*_client.py", "tandem/client.py", "tandem/v1/*_pb2_grpc.py"),
    "grpc_health": ("*_server.py", "*_client.py"),
    "grpc_reflection": ("*_server.py",),
    "ucxx": ("kvtransfer/ucx.py",),
    "pickle": (),
    "cPickle": (),
    "cloudpickle": (),
    "dill": (),
    "joblib": (),
    "marshal": (),
    "shelve": (),
}
"""Foreign package → the only files of the rooms that may import it."""

PICKLING_CALLS = {"send_pyobj", "recv_pyobj"}
"""Methods of ZeroMQ sockets."""

TORCH = ("torch", "triton", "transformers", "safetensors.torch")
TORCH_FREE = (
    "tandem/*.py",
    "engine/__init__.py",
    *(f"engine/{name}.py" for name in ("types", "errors", "config", "hashing")),
    *(f"engine/{name}.py" for name in ("blocks", "prefix_cache", "sequence", "scheduler", "step_times")),
    "kvtransfer/__init__.py",
    "kvtransfer/types.py",
    "kvtransfer/transport.py",
    "cluster/__init__.py",
    "cluster/policies/*.py",
    *(f"cluster/{name}.py" for name in ("config", "config_text", "router", "ledger", "snapshot", "index")),
    *(f"cluster/{name}.py" for name in ("membership", "planner", "metrics", "status")),
    *(f"cluster/{name}.py" for name in ("text", "detokenize", "templates", "validate", "dispatch", "streams")),
    *(f"cluster/{name}.py" for name in ("gateway", "http_server", "openai_types", "inference_server")),
)
"""Deciders and front ends: they start fast and small, and no kernel can stall them."""


@dataclass(frozen=True)
class Import:
    """`from package import name` is `package.name`: a module or a name within one."""

    target: str
    line: int
    at_runtime: bool

    def is_of(self, package: str) -> bool:
        return self.target == package or self.target.startswith(package + ".")


def files_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name_of(path), pattern) for pattern in patterns)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, also those inside functions; those for the type checker alone are marked."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return tuple(
        Import(target, node.lineno, id(node) not in typing_only)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in targets_of(node, path)
    )


def targets_of(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    package = path.relative_to(ROOT).parent.parts
    base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
    source = ".".join(part for part in (base, node.module) if part)
    yield from (f"{source}.{alias.name}" for alias in node.names)


def modules_loaded_by(target: str) -> Iterator[Path]:
    """Our files that importing `target` runs: the packages on the way, then the module itself."""
    parts = target.split(".")
    for length in range(1, len(parts) + 1):
        module = ROOT.joinpath(*parts[:length])
        for candidate in (module / "__init__.py", module.with_suffix(".py")):
            if candidate.is_file():
                yield candidate


def road_to_torch(path: Path, seen: set[Path]) -> list[str]:
    """The chain of imports from a file to torch, empty when there is none."""
    seen.add(path)
    for found in imports_of(path):
        if not found.at_runtime:
            continue
        if any(found.is_of(package) for package in TORCH):
            return [name_of(path), found.target]
        for module in modules_loaded_by(found.target):
            if module not in seen and (road := road_to_torch(module, seen)):
                return [name_of(path), *road]
    return []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    trespasses = [
        f"{name_of(path)}:{found.line} imports {found.target}"
        for path in files_of(room)
        for found in imports_of(path)
        if any(found.is_of(other) for other in (*ROOMS, *WORKSHOPS))
        and not any(found.is_of(allowed) for allowed in ROOMS[room])
    ]
    assert trespasses == []


@pytest.mark.parametrize("package", OWNERS)
def test_a_foreign_package_stays_with_its_owner(package: str) -> None:
    trespasses = [
        f"{name_of(path)}:{found.line} imports {found.target}"
        for path in files_of(*ROOMS)
        for found in imports_of(path)
        if found.is_of(package) and not matches(path, OWNERS[package])
    ]
    assert trespasses == []


def test_the_transfer_engine_needs_no_more_than_its_head_says() -> None:
    foreign = {
        found.target.partition(".")[0]
        for path in files_of("kvtransfer")
        for found in imports_of(path)
        if not found.is_of("kvtransfer")
    }
    assert foreign - sys.stdlib_module_names == {"numpy", "xxhash", "msgpack", "ucxx"}


def test_no_call_unpickles_what_arrives() -> None:
    calls = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node.func)}"
        for path in files_of(*ROOMS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in PICKLING_CALLS or ast.unparse(node.func) == "torch.load"
    ]
    assert calls == []


def test_what_must_be_free_of_torch_never_reaches_it() -> None:
    free = [path for path in files_of(*ROOMS) if matches(path, TORCH_FREE)]
    roads = [" → ".join(road) for path in free if (road := road_to_torch(path, set()))]
    assert roads == []
    assert name_of(ROOT / "tandem/wire.py") in map(name_of, free)


def test_a_hidden_road_to_torch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    files = {
        "cluster/router.py": "from .policies import hidden\n",
        "cluster/policies/__init__.py": "",
        "cluster/policies/hidden.py": "def late():\n    from engine import lazy\n    return lazy\n",
        "engine/lazy.py": "import torch.nn\n",
        "engine/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    road = ["cluster/router.py", "cluster/policies/hidden.py", "engine/lazy.py", "torch.nn"]
    assert road_to_torch(tmp_path / "cluster/router.py", set()) == road
    assert road_to_torch(tmp_path / "engine/typed.py", set()) == []


def test_every_folder_with_code_is_a_known_room() -> None:
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    assert folders <= {*ROOMS, *WORKSHOPS}


def test_the_schemas_are_not_a_package() -> None:
    assert list((ROOT / "proto").rglob("*.py")) == []
    assert list((ROOT / "proto").rglob("*.proto")) != []


def test_every_test_is_one_that_pytest_collects() -> None:
    lost = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in files_of("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if not (path.name.startswith("test_") and node in collected_functions(tree_of(path)))
    ]
    assert lost == []


def collected_functions(tree: ast.Module) -> list[ast.stmt]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    return [*tree.body, *(statement for cls in classes for statement in cls.body)]


def test_no_two_test_files_hide_each_other() -> None:
    """Without packages, pytest knows a test file by its base name; a package named like a room would hide the room."""
    assert [name_of(path) for path in files_of("tests") if path.name == "__init__.py"] == []
    names = [path.name for path in files_of("tests") if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
