"""From an SLA file to frozen sections, refusing everything that is not understood.

One table per section says which keys it has, which field each fills and how its value is read. Every problem of a file
is collected and told at once, each with file, line, key path and remedy: an unknown key names the nearest valid one
(or the section where it belongs), a bare number where a duration is due asks for its unit. Nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config import (
    FETCH,
    LOCAL_PREFILL,
    POLICY_NAMES,
    ROLES,
    STAGING,
    TRANSPORTS,
    ClusterSection,
    GatewaySection,
    ModelSection,
    PoolSection,
    PoolsSection,
    RoutingSection,
    SlaClass,
    TandemConfig,
    TimeoutsSection,
    TlsSection,
    TransferSection,
    engine_config,
    profiled_pool,
)
from cluster.config_values import (
    Reader,
    Unreadable,
    boolean,
    duration,
    folder,
    integer,
    number,
    one_of,
    size,
    size_or_none,
    some_of,
    text,
)
from cluster.yaml_lines import Node, YamlProblem, parse
from engine.config import BATCHINGS, HASHES, KERNELS, PREEMPTIONS, WEIGHTS
from engine.errors import ConfigError, TandemError
from engine.profiles import PROFILES
from kvtransfer.plan import sizes_fit
from kvtransfer.tiers.types import TierSettings

VERSION = 1
MAX_FILE_BYTES = 1 << 20


class ConfigFileError(TandemError):
    """An SLA file is at fault; `problems` are its lines, each `file:line: key path: what is wrong; remedy`."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# -- the keys of every section ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that fills one field. `read` takes the plain value."""

    field: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping that fills one dataclass. `shorthand`: the key that a plain text instead of the mapping stands for."""

    make: Callable[..., Any]
    keys: Mapping[str, Setting | Section | ClassTable]
    shorthand: str | None = None
    required: tuple[str, ...] = ()
    field: str = ""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """A mapping from names that the file chooses to sections of one kind."""

    each: Section
    field: str


_DTYPE = one_of(("float32", "bfloat16", "float16"), {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
_COUNT = integer(1)
_PORT = integer(1, 65535)
_PROFILE = Setting("profile", one_of(tuple(PROFILES)))

_TIERS = Section(
    TierSettings,
    {
        "host_memory": Setting("host_bytes", size),
        "disk_path": Setting("disk_path", folder),
        "disk_space": Setting("disk_bytes", size),
        "io_timeout": Setting("io_timeout_s", duration),
        "fsync": Setting("fsync", boolean),
    },
    required=("host_memory",),
    field="tiers",
)
_POOL: Mapping[str, Setting | Section] = {
    "count": Setting("count", integer(1, 1024)),
    "threads": Setting("threads", _COUNT),
    "profile": _PROFILE,
    "num_blocks": Setting("num_blocks", _COUNT),
    "kv_memory": Setting("kv_memory_bytes", size),
    "block_size": Setting("block_size", integer(16)),
    "max_num_batched_tokens": Setting("max_num_batched_tokens", integer(16)),
    "max_num_seqs": Setting("max_num_seqs", _COUNT),
    "batching": Setting("batching", one_of(BATCHINGS)),
    "chunked_prefill": Setting("chunked_prefill", boolean),
    "preemption": Setting("preemption", one_of(PREEMPTIONS)),
    "swap_memory": Setting("swap_bytes", size_or_none),
    "tiers": _TIERS,
}
_CLASS = Section(
    SlaClass,
    {
        "ttft": Setting("ttft_s", duration),
        "itl": Setting("itl_s", duration),
        "priority": Setting("priority", integer(-1000, 1000)),
        "timeout": Setting("timeout_s", duration),
    },
)
_MODEL = Section(
    ModelSection,
    {
        "name": Setting("name", text),
        "path": Setting("path", text),
        "dtype": Setting("dtype", _DTYPE),
        "kv_dtype": Setting("kv_dtype", _DTYPE),
        "device": Setting("device", text),
        "weights": Setting("weights", one_of(WEIGHTS)),
        "kernels": Setting("kernels", one_of(KERNELS)),
        "block_size": Setting("block_size", integer(16)),
        "max_model_len": Setting("max_model_len", _COUNT),
        "prefix_caching": Setting("prefix_caching", boolean),
        "prefix_hash": Setting("prefix_hash", one_of(HASHES)),
        "hash_seed": Setting("hash_seed", integer(0)),
    },
    shorthand="name",
    field="model",
)
_POOLS = Section(
    PoolsSection,
    {
        "profile": _PROFILE,
        "prefill": Section(PoolSection, _POOL, field="prefill"),
        "decode": Section(PoolSection, _POOL, field="decode"),
    },
    field="pools",
)
_ROUTING = Section(
    RoutingSection,
    {
        "policy": Setting("policy", one_of(POLICY_NAMES)),
        "local_prefill": Setting("local_prefill", one_of(LOCAL_PREFILL)),
        "local_prefill_gain": Setting("local_prefill_gain", number(1.0)),
        "fetch": Setting("fetch", one_of(FETCH)),
        "fetch_gain": Setting("fetch_gain", number(1.0)),
        "prefix_affinity": Setting("prefix_affinity", boolean),
        "max_waiting": Setting("max_waiting", _COUNT),
        "assumed_bandwidth": Setting("assumed_bytes_per_s", size),
    },
    shorthand="policy",
    field="routing",
)
_TLS = Section(
    TlsSection,
    {
        "cert": Setting("cert", text),
        "key": Setting("key", text),
        "client_ca": Setting("client_ca", text),
        "ca": Setting("ca", text),
    },
    required=("cert", "key"),
    field="tls",
)
_GATEWAY = Section(
    GatewaySection,
    {
        "host": Setting("host", text),
        "http_port": Setting("http_port", _PORT),
        "grpc_port": Setting("grpc_port", _PORT),
        "api_key_env": Setting("api_key_env", text),
        "max_message": Setting("max_message_bytes", size),
        "max_streams": Setting("max_streams", _COUNT),
        "tls": _TLS,
    },
    field="gateway",
)
_TRANSFER = Section(
    TransferSection,
    {
        "transports": Setting("transports", some_of(TRANSPORTS)),
        "checksums": Setting("checksums", boolean),
        "staging": Setting("staging", one_of(STAGING)),
        "staging_memory": Setting("staging_bytes", size),
        "net_device": Setting("net_device", text),
        "link_probes": Setting("link_probes", boolean),
    },
    field="transfer",
)
_TIMEOUTS = Section(
    TimeoutsSection,
    {
        "heartbeat": Setting("heartbeat_s", duration),
        "suspect": Setting("suspect_s", duration),
        "fence": Setting("fence_s", duration),
        "lease": Setting("lease_s", duration),
        "quiet": Setting("quiet_s", duration),
        "connect": Setting("connect_s", duration),
        "request": Setting("request_s", duration),
        "resume": Setting("resume_s", duration),
        "start": Setting("start_s", duration),
        "drain": Setting("drain_s", duration),
        "restart_backoff": Setting("restart_backoff_s", duration),
        "restart_backoff_max": Setting("restart_backoff_max_s", duration),
        "max_start_failures": Setting("max_start_failures", _COUNT),
    },
    field="timeouts",
)
_CLUSTER = Section(
    ClusterSection,
    {
        "namespace": Setting("namespace", text),
        "ray_address": Setting("ray_address", text),
        "num_cpus": Setting("num_cpus", _COUNT),
    },
    field="cluster",
)
ROOT = Section(
    TandemConfig,
    {
        "version": Setting("version", integer(VERSION, VERSION)),
        "model": _MODEL,
        "pools": _POOLS,
        "routing": _ROUTING,
        "classes": ClassTable(_CLASS, "classes"),
        "gateway": _GATEWAY,
        "transfer": _TRANSFER,
        "timeouts": _TIMEOUTS,
        "cluster": _CLUSTER,
    },
)


# -- reading ------------------------------------------------------------------------------------------------------


def read_config(path: Path) -> TandemConfig:
    """The config in this file. Raises ConfigFileError with every problem found."""
    return config_from_text(_text_of(path), str(path))


def config_from_text(source: str, name: str = "config") -> TandemConfig:
    """As `read_config`, from text; `name` is how messages call it."""
    walk = _Walk(name)
    try:
        document = parse(source)
    except YamlProblem as problem:
        raise ConfigFileError((f"{name}:{problem.line}: {problem.message}",)) from problem
    if document is None:
        raise ConfigFileError((f"{name}:1: the file is empty; write at least `version: {VERSION}`",))
    if not document.is_mapping:
        keys = ", ".join(ROOT.keys)
        raise ConfigFileError((f"{name}:{document.line}: the top level must be a mapping with keys such as {keys}",))
    config = walk.section(ROOT, document, "")
    if walk.problems:
        raise ConfigFileError(tuple(walk.problems))
    assert isinstance(config, TandemConfig)
    return _finished(config, document, walk)


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigFileError((f"{path}: larger than {MAX_FILE_BYTES} bytes; is it an SLA file?",))
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileError((f"{path}: there is no such file; deploy/ holds examples",)) from None
    except IsADirectoryError:
        raise ConfigFileError((f"{path}: this is a directory; name the SLA file in it",)) from None
    except UnicodeDecodeError as error:
        raise ConfigFileError((f"{path}: not UTF-8 text at byte {error.start}; save it as UTF-8",)) from None
    except OSError as error:
        raise ConfigFileError((f"{path}: cannot be read: {error.strerror}",)) from None


class _Walk:
    """One pass over a document: collects problems, and remembers where every key stood."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.problems: list[str] = []
        self.lines: dict[str, int] = {}

    def complain(self, line: int, path: str, message: str) -> None:
        self.problems.append(f"{self._name}:{line}: {path}: {message}")

    def place(self, path: str) -> str:
        return f"{self._name}:{self.lines.get(path, 1)}"

    def where(self, path: str) -> str:
        return f"{self.place(path)}: {path}"

    def section(self, section: Section, node: Node, path: str) -> Any:
        """The section's dataclass; None when a problem was found in it."""
        if section.shorthand and isinstance(node.value, str):
            setting = section.keys[section.shorthand]
            assert isinstance(setting, Setting)
            before = len(self.problems)
            value = self._value(setting, node, path)
            return section.make(**{setting.field: value}) if len(self.problems) == before else None
        if not node.is_mapping:
            self.complain(node.line, path, f"must be a mapping with keys such as {', '.join(section.keys)}")
            return None
        before = len(self.problems)
        fields = self._entries(section, node, path)
        for name in section.required:
            if name not in node.value:
                self.complain(node.line, path, f"needs {name!r} too")
        return section.make(**fields) if len(self.problems) == before else None

    def _entries(self, section: Section, node: Node, path: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, (key, value) in node.value.items():
            here = f"{path}.{name}" if path else name
            self.lines[here] = key.line
            entry = section.keys.get(name)
            if entry is None:
                self.complain(key.line, here, unknown_key(name, section.keys, path))
            elif value.value is None:
                self.complain(key.line, here, "has no value; give one or take the key out")
            elif isinstance(entry, Setting):
                fields[entry.field] = self._value(entry, value, here)
            elif isinstance(entry, ClassTable):
                fields[entry.field] = self._classes(entry, value, here)
            else:
                fields[entry.field] = self.section(entry, value, here)
        return fields

    def _value(self, setting: Setting, node: Node, path: str) -> Any:
        try:
            return setting.read(node.value)
        except Unreadable as error:
            self.complain(node.line, path, f"is {_shown(node)}; it must be {error}")
            return None

    def _classes(self, table: ClassTable, node: Node, path: str) -> dict[str, SlaClass]:
        if not node.is_mapping:
            self.complain(node.line, path, "must be a mapping from class names to their promises")
            return {}
        classes = {}
        for name, (key, value) in node.value.items():
            here = f"{path}.{name}"
            self.lines[here] = key.line
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
                self.complain(key.line, here, "a class name has up to 64 letters, digits, '_', '-' and '.'")
                continue
            empty = Node({}, key.line) if value.value is None else value
            made = self.section(table.each, empty, here)
            if made is not None:
                classes[name] = replace(made, name=name)
        return classes


def unknown_key(name: str, valid: Mapping[str, Setting | Section | ClassTable], path: str) -> str:
    """What to say of a key that does not exist: those that go on where it ends, or else the nearest that does and the
    section where it belongs."""
    if longer := [repr(key) for key in valid if key.startswith(f"{_folded(name)}_")]:
        return f"there is no such key here; did you mean {' or '.join(longer)}?"
    folded = {entry.field: key for key, entry in valid.items()} | {_folded(key): key for key in valid}
    near = difflib.get_close_matches(_folded(name), folded, n=1, cutoff=0.6)
    homes = [home for home in _homes(ROOT, name) if home != path]
    hints = [f"did you mean {folded[near[0]]!r}?"] if near else []
    hints += [f"{_folded(name)!r} belongs under {' or '.join(homes)}"] if homes else []
    return f"there is no such key here; {' '.join(hints) or 'valid: ' + ', '.join(valid)}"


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _homes(section: Section, name: str, path: str = "") -> list[str]:
    """Sections in which this key is valid."""
    found = []
    for key, entry in section.keys.items():
        here = f"{path}.{key}" if path else key
        if key == _folded(name):
            found.append(path or "the top level")
        if isinstance(entry, Section):
            found += _homes(entry, name, here)
        elif isinstance(entry, ClassTable):
            found += _homes(entry.each, name, f"{here}.<class>")
    return found


def _shown(node: Node) -> str:
    if node.is_mapping:
        return "a mapping"
    if isinstance(node.value, tuple):
        return "a list of " + (", ".join(repr(item.value)[:40] for item in node.value) or "nothing")
    return repr(node.value)[:80]


# -- what only the whole file can tell ----------------------------------------------------------------------------


def _finished(config: TandemConfig, document: Node, walk: _Walk) -> TandemConfig:
    config = replace(config, pools=_profiled(config.pools, walk))
    _check_together(config, walk)
    if walk.problems:
        raise ConfigFileError(tuple(walk.problems))
    named = document.value.get("classes")
    stated = {} if named is None else named[1].value
    classes = {"default": SlaClass(), **config.classes}
    for name, sla in classes.items():
        has_timeout = name in stated and stated[name][1].is_mapping and "timeout" in stated[name][1].value
        if not has_timeout:
            classes[name] = replace(sla, timeout_s=config.timeouts.request_s)
    config = replace(config, classes=classes, model=_named(config.model, walk))
    places = {path: walk.place(path) for path in walk.lines}
    return replace(config, warnings=tuple(_doubts(config, walk)), places=places)


def _named(model: ModelSection, walk: _Walk) -> ModelSection:
    """A path without a name is served under its last part, not under the default model's name."""
    if model.path is None or "model.name" in walk.lines:
        return model
    path = Path(model.path)
    return replace(model, name=path.stem if path.suffix == ".gguf" else path.name)


def _profiled(pools: PoolsSection, walk: _Walk) -> PoolsSection:
    """The pools with what their profiles set; what stands in the file wins."""
    made = {}
    for role in ROLES:
        path = f"pools.{role}"
        pool = pools.of(role)
        named = pool if f"{path}.profile" in walk.lines else replace(pool, profile=pools.profile)
        stated = {setting.field for key, setting in _POOL.items() if f"{path}.{key}" in walk.lines}
        made[role] = profiled_pool(named, role, stated)
    return replace(pools, prefill=made["prefill"], decode=made["decode"])


def _check_engines(config: TandemConfig, walk: _Walk) -> None:
    """What the engine itself would refuse when it starts."""
    faults: dict[str, str] = {}
    for role in ROLES:
        try:
            engine_config(config, role, config.model.path or config.model.name)
        except ConfigError as error:
            faults[_engine_paths(role, walk.lines)[error.field]] = error.fault
    for path, fault in faults.items():
        walk.complain(walk.lines.get(path, walk.lines.get(path.rpartition(".")[0], 1)), path, fault)


def _engine_paths(role: str, stated: Collection[str]) -> dict[str, str]:
    """The file's key for each engine setting of a worker of this role: the pool's, unless only the model's is there."""
    paths = {entry.field: f"model.{key}" for key, entry in _MODEL.keys.items()}
    for key, entry in _POOL.items():
        path = f"pools.{role}.{key}"
        if path in stated or paths.get(entry.field) not in stated:
            paths[entry.field] = path
    return paths


def engine_keys(config: TandemConfig, role: str) -> dict[str, str]:
    """The same for people: with file and line where the config's file says it. With it the settings of the transfer and
    of the lower tiers that only a worker can judge."""
    paths = _engine_paths(role, config.places)
    paths |= {"staging_bytes": "transfer.staging_memory", "net_device": "transfer.net_device"}
    paths |= {entry.field: f"pools.{role}.tiers.{key}" for key, entry in _TIERS.keys.items()}
    told = {field: (config.places.get(path), path) for field, path in paths.items()}
    return {field: f"{place}: {path}" if place else path for field, (place, path) in told.items()}


def _check_together(config: TandemConfig, walk: _Walk) -> None:
    times, gateway = config.timeouts, config.gateway
    _check_engines(config, walk)
    if not times.heartbeat_s < times.suspect_s < times.fence_s:
        _refuse(walk, "timeouts", "heartbeat must be shorter than suspect, and suspect than fence", times_of(config))
    sizes = [config.pools.of(role).block_size or config.model.block_size for role in ROLES]
    if not walk.problems and not sizes_fit(*sizes):
        where = next(path for path in ("pools.prefill.block_size", "pools.decode.block_size") if path in walk.lines)
        both = f"{sizes[0]} for prefill, {sizes[1]} for decode"
        _refuse(walk, where, "the larger block size must be a multiple of the smaller", both)
    if config.transfer.staging == "never" and config.transfer.checksums:
        rule = "bytes that nobody here can look at have no checksums: leave them off, or use staging: auto"
        _refuse(walk, "transfer.checksums", rule, "true with staging: never")
    if gateway.http_port == gateway.grpc_port:
        _refuse(walk, "gateway.grpc_port", "must differ from http_port", str(gateway.grpc_port))
    if times.restart_backoff_s > times.restart_backoff_max_s:
        _refuse(walk, "timeouts.restart_backoff", "must not exceed restart_backoff_max", f"{times.restart_backoff_s} s")


def times_of(config: TandemConfig) -> str:
    times = config.timeouts
    return f"{times.heartbeat_s:g} s, {times.suspect_s:g} s, {times.fence_s:g} s"


def _refuse(walk: _Walk, path: str, rule: str, value: str) -> None:
    walk.complain(walk.lines.get(path, 1), path, f"{rule} (now {value})")


def _idle(config: TandemConfig, pool: str, walk: _Walk) -> list[tuple[str, str]]:
    """The keys of a pool (`pools.prefill`) that another setting makes useless, and which."""
    section = config.pools.of(pool.rpartition(".")[2])
    idle = []
    if section.preemption == "recompute":
        idle.append(("swap_memory", "with preemption: recompute"))
    if section.tiers is not None and section.tiers.disk_path is None:
        idle += [(f"tiers.{key}", "without disk_path") for key in ("disk_space", "io_timeout", "fsync")]
    if not config.model.prefix_caching:
        idle.append(("tiers", "with prefix_caching: false"))
    return [(key, why) for key, why in idle if f"{pool}.{key}" in walk.lines]


def _crowded(config: TandemConfig, pool: str, walk: _Walk) -> list[str]:
    section = config.pools.of(pool.rpartition(".")[2])
    if section.max_num_batched_tokens >= section.max_num_seqs:
        return []
    keys = (f"{pool}.max_num_batched_tokens", f"{pool}.max_num_seqs")
    where = walk.where(next(key for key in keys if key in walk.lines))
    story = f"{section.max_num_batched_tokens} tokens a step are too few for {section.max_num_seqs} sequences"
    return [f"{where}: {story}; some would wait between tokens"]


_PLAUSIBLE_S = {"ttft": (1e-3, 600.0), "itl": (1e-4, 60.0), "timeout": (0.1, 86400.0)}


def _doubts(config: TandemConfig, walk: _Walk) -> list[str]:
    """What is allowed and still looks like a slip: of the unit, of the address, of two settings for one thing."""
    doubts = []
    for pool in (f"pools.{role}" for role in ROLES):
        if f"{pool}.num_blocks" in walk.lines and f"{pool}.kv_memory" in walk.lines:
            doubts.append(f"{walk.where(f'{pool}.kv_memory')}: has no effect beside num_blocks, which says the size")
        doubts += [f"{walk.where(f'{pool}.{key}')}: has no effect {why}" for key, why in _idle(config, pool, walk)]
        doubts += _crowded(config, pool, walk)
    for name, sla in config.classes.items():
        values = {"ttft": sla.ttft_s, "itl": sla.itl_s, "timeout": sla.timeout_s}
        for key, value in values.items():
            low, high = _PLAUSIBLE_S[key]
            if value is not None and not low <= value <= high:
                doubts.append(f"{walk.where(f'classes.{name}.{key}')}: {value:g} s is implausible; is the unit right?")
        if sla.ttft_s is not None and sla.ttft_s > sla.timeout_s:
            doubts.append(f"{walk.where(f'classes.{name}.ttft')}: the timeout ({sla.timeout_s:g} s) comes before it")
        if sla.itl_s is not None and sla.ttft_s is not None and sla.itl_s > sla.ttft_s:
            doubts.append(f"{walk.where(f'classes.{name}.itl')}: longer than ttft; are they exchanged?")
    if config.gateway.host not in ("127.0.0.1", "::1", "localhost") and config.gateway.api_key_env is None:
        doubts.append(f"{walk.where('gateway.host')}: reachable by others and no api_key_env is set")
    return doubts
