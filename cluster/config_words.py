"""A config in words, for `tandem config check`: what it will do, in the order in which people ask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cluster import net_devices
from cluster.config import ROLES, ModelSection, PoolSection, SlaClass, TandemConfig
from cluster.models import KNOWN


def doubts_here(config: TandemConfig) -> tuple[str, ...]:
    """What looks like a mistake from this machine; another one, where a worker runs, may know better."""
    return (
        *_doubts_of_model(config.model),
        *_doubts_of_memory(config),
        *_doubts_of_disks(config),
        *_doubts_of_devices(config.transfer.net_device),
    )


def _doubts_of_model(model: ModelSection) -> Iterator[str]:
    path = model.path
    if path is not None and not Path(path).expanduser().exists():
        yield f"model.path: there is nothing at {path} on this machine; each worker's host needs it there"
    if path is None and model.name not in KNOWN and not Path(model.name).expanduser().exists():
        known = ", ".join(KNOWN)
        yield f"model.name: {model.name!r} is no built-in model ({known}); give its place as model.path"


def _doubts_of_memory(config: TandemConfig) -> Iterator[str]:
    """Of KV in host memory: pages are taken as KV comes, so what is too large fails under load, or at the start."""
    here, cores = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), os.cpu_count() or 1
    for role in ROLES:
        pool, on_cpu = config.pools.of(role), config.model.device == "cpu"
        kv_bytes = pool.kv_memory_bytes if on_cpu and pool.num_blocks is None else 0
        tier_bytes = pool.tiers.host_bytes if pool.tiers is not None else 0
        too_much = f"is more than the {here >> 30} GiB of this machine"
        if pool.count * kv_bytes > here:
            yield f"pools.{role}.kv_memory: {pool.count} times {_size(kv_bytes)} {too_much}"
        if pool.count * tier_bytes > here:
            yield f"pools.{role}.tiers.host_memory: {pool.count} times {_size(tier_bytes)} {too_much}"
        elif pool.count * kv_bytes <= here < pool.count * (kv_bytes + tier_bytes):
            wanted = f"{pool.count} times {_size(tier_bytes)} and {_size(kv_bytes)} of KV cache"
            yield f"pools.{role}.tiers.host_memory: {wanted} {too_much}"
        if on_cpu and pool.threads > cores:
            yield f"pools.{role}.threads: {pool.threads} on {_count(cores, 'core')} of this machine hold each other up"


def _doubts_of_disks(config: TandemConfig) -> Iterator[str]:
    """A disk tier that cannot be used costs no request anything, so nobody would notice."""
    for role in ROLES:
        tiers = config.pools.of(role).tiers
        if tiers is None or tiers.disk_path is None:
            continue
        there = next(place for place in (Path(tiers.disk_path), *Path(tiers.disk_path).parents) if place.exists())
        if what := _unfit_for_files(there):
            why = f"{there} is {what} on this machine"
            yield f"pools.{role}.tiers.disk_path: {why}: no KV is kept there; name one that workers may fill"


def _unfit_for_files(there: Path) -> str | None:
    """What it is instead of a folder to fill. /proc and its like tell root that it may write, but have no blocks."""
    if not there.is_dir():
        return "no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return "not writable"
    return None if os.statvfs(there).f_blocks else "no place for files"


def _doubts_of_devices(net_device: str | None) -> Iterator[str]:
    for absent in net_devices.missing(net_device) if net_device is not None else ():
        yield f"transfer.net_device: there is no {absent} on this machine; each worker's host needs it"


def describe(config: TandemConfig) -> str:
    """Several lines of plain text, warnings last."""
    return "\n".join(_lines(config))


def _lines(config: TandemConfig) -> Iterator[str]:
    model, routing, gateway = config.model, config.routing, config.gateway
    where = f"from {model.path}" if model.path else "the built-in checkpoint"
    cache = f"prefix caching on ({model.prefix_hash} hashes)" if model.prefix_caching else "prefix caching off"
    yield f"Model {model.name} ({where}) in {model.dtype} on {model.device}, KV cache in"
    yield f"  {model.kv_dtype or model.dtype} with blocks of {model.block_size} tokens; {cache}."
    if model.max_model_len:
        yield f"  Prompt and answer together have at most {model.max_model_len} tokens."
    yield _pool("Prefill", config.pools.prefill)
    yield _pool("Decode", config.pools.decode)
    yield f"Requests are routed by the policy {routing.policy}; {_LOCAL[routing.local_prefill]}."
    if routing.fetch == "auto" and model.prefix_caching:
        yield "  A prefix that only another worker holds is fetched from there when that is faster than computing it."
    for sla in config.classes.values():
        yield _class(sla)
    yield f"The gateway listens on {gateway.host}: HTTP on port {gateway.http_port}, gRPC on port {gateway.grpc_port};"
    secured = "with TLS" if gateway.tls else "without TLS"
    key = f"clients need the key in ${gateway.api_key_env}" if gateway.api_key_env else "anybody who reaches it may ask"
    yield f"  {secured}, {key}; at most {gateway.max_streams} streams at once."
    sums = "with" if config.transfer.checksums else "without"
    probes = "idle pairs are measured" if config.transfer.link_probes else "pairs are measured by what they move alone"
    by = f" by {config.transfer.net_device}" if config.transfer.net_device else ""
    yield f"KV moves over {', else '.join(config.transfer.transports)}{by}, {sums} checksums; {probes}."
    if config.transfer.staging == "always":
        yield f"  It goes by way of {_size(config.transfer.staging_bytes)} of staging memory at either end."
    times = config.timeouts
    yield f"A worker silent for {_time(times.suspect_s)} is avoided, for {_time(times.fence_s)} fenced and restarted;"
    yield f"  after {times.max_start_failures} failed starts in a row it is given up."
    yield from (f"Warning: {warning}" for warning in config.warnings)


_LOCAL = {
    "auto": "a decode worker computes a prompt itself when that is faster and breaks no promise",
    "never": "prompts are always computed by prefill workers",
    "always": "decode workers compute all prompts themselves",
}


def _pool(name: str, pool: PoolSection) -> str:
    workers = _count(pool.count, "worker")
    memory = _count(pool.num_blocks, "KV block") if pool.num_blocks else f"{_size(pool.kv_memory_bytes)} of KV cache"
    memory += f" in blocks of {pool.block_size} tokens" if pool.block_size else ""
    step = f"steps of up to {_count(pool.max_num_batched_tokens, 'token')} and {_count(pool.max_num_seqs, 'sequence')}"
    first = f"{name}: {workers}, each with {_count(pool.threads, 'thread')}, {memory}, {step}"
    batching = _BATCHING[pool.batching, pool.chunked_prefill]
    return f"{first} ({pool.profile}).\n  {batching};\n  {_preemption(pool)}.{_tiers(pool)}"


_BATCHING = {
    ("continuous", True): "Requests join and leave at every step, long prompts in chunks",
    ("continuous", False): "Requests join and leave at every step, prompts in steps of their own",
    ("static", True): "Static batches: nobody joins before all have ended (a baseline to measure against)",
    ("static", False): "Static batches: nobody joins before all have ended (a baseline to measure against)",
}


def _preemption(pool: PoolSection) -> str:
    space = f"{_size(pool.swap_bytes)} of host memory"
    if pool.preemption == "recompute" or not pool.swap_bytes:
        return "without room its KV is computed again"
    if pool.preemption == "swap":
        return f"without room KV goes to {space}"
    return f"without room KV goes to {space} or is computed again, whichever is cheaper"


def _tiers(pool: PoolSection) -> str:
    if pool.tiers is None:
        return ""
    disk = f", then {_size(pool.tiers.disk_bytes)} under {pool.tiers.disk_path}" if pool.tiers.disk_path else ""
    return f"\n  KV that leaves the cache goes to {_size(pool.tiers.host_bytes)} of host memory{disk}."


def _class(sla: SlaClass) -> str:
    first = f"first token within {_time(sla.ttft_s)}" if sla.ttft_s is not None else "no promise for the first token"
    next_ = f"then one every {_time(sla.itl_s)}" if sla.itl_s is not None else "no promise between tokens"
    return f"Class {sla.name}: {first}, {next_}; priority {sla.priority}, ended after {_time(sla.timeout_s)}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:g} {unit}"
    return f"{num_bytes} bytes"
