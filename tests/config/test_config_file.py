"""An SLA file means what it says, or it is refused with file, line, key and remedy."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from cluster.config import (
    POLICY_NAMES,
    ROLES,
    PoolSection,
    SlaClass,
    TandemConfig,
    default_config,
    engine_config,
    load_config,
    worker_names,
)
from cluster.config_text import ROOT, ClassTable, ConfigFileError, Section, config_from_text
from cluster.config_words import describe, doubts_here
from cluster.policies import POLICIES
from engine.profiles import PROFILES, profile_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SLA_FILES = sorted(DEPLOY.glob("*.sla.yaml"))
PROFILE_KEYS = sorted({key for name in PROFILES for role in ROLES for key in profile_settings(name, role)})


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigFileError) as caught:
        config_from_text(text, "sla.yaml")
    return caught.value.problems


def problem(text: str) -> str:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


# -- what is shipped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SLA_FILES, ids=lambda path: path.name)
def test_every_shipped_file_loads_without_a_warning_and_can_be_said_in_words(path: Path) -> None:
    config = load_config(path)
    assert config.warnings == ()
    assert config.model.name in describe(config)


def test_the_demo_is_one_pair_with_an_interactive_and_a_batch_class() -> None:
    config = load_config(DEPLOY / "demo.sla.yaml")
    assert [config.pools.of(role).count for role in ROLES] == [1, 1]
    assert [config.pools.of(role).threads for role in ROLES] == [1, 1]
    assert (config.model.name, config.model.dtype) == ("smollm2-135m", "bfloat16")
    assert set(config.classes) == {"default", "interactive", "batch"}
    assert config.transfer.transports[0] == "ucx"


def test_the_examples_cover_both_uneven_shapes() -> None:
    shapes = {tuple(load_config(path).pools.of(role).count for role in ROLES) for path in SLA_FILES}
    assert {(1, 1), (2, 1), (1, 2)} <= shapes


def test_a_file_with_a_version_alone_is_the_default_config() -> None:
    assert config_from_text("version: 1") == default_config()


# -- what the sections mean ---------------------------------------------------------------------------------------


def test_durations_and_sizes_are_seconds_and_bytes_whatever_their_unit() -> None:
    config = config_from_text(
        "classes:\n"
        "  a: {ttft: 200ms, itl: 0.05s, timeout: 5m, priority: 3}\n"
        "  b: {ttft: 0.2s, itl: 50 ms, timeout: 300s}\n"
        "pools: {prefill: {kv_memory: 1.5GiB}, decode: {kv_memory: 2GB}}\n"
    )
    assert config.classes["a"] == SlaClass(name="a", ttft_s=0.2, itl_s=0.05, priority=3, timeout_s=300.0)
    assert config.classes["b"].ttft_s == config.classes["a"].ttft_s
    assert config.classes["b"].itl_s == config.classes["a"].itl_s
    assert config.pools.prefill.kv_memory_bytes == 3 << 29
    assert config.pools.decode.kv_memory_bytes == 2 * 10**9


def test_a_class_without_a_timeout_has_the_one_of_the_section() -> None:
    config = config_from_text("timeouts: {request: 42s}\nclasses:\n  a:\n  b: {timeout: 7s}\n")
    assert {name: sla.timeout_s for name, sla in config.classes.items()} == {"default": 42.0, "a": 42.0, "b": 7.0}


def test_a_word_stands_for_a_section_that_has_an_obvious_one() -> None:
    config = config_from_text("model: my-model\nrouting: round_robin\n")
    assert (config.model.name, config.routing.policy) == ("my-model", "round_robin")


@pytest.mark.parametrize(("path", "name"), [("/models/llama-3", "llama-3"), ("/models/tiny.gguf", "tiny")])
def test_a_path_without_a_name_is_served_under_its_last_part(path: str, name: str) -> None:
    assert config_from_text(f"model: {{path: {path}}}").model.name == name
    assert config_from_text(f"model: {{path: {path}, name: mine}}").model.name == "mine"


def test_the_engine_settings_of_a_role_come_from_the_model_and_its_pool() -> None:
    config = config_from_text(
        "model: {dtype: fp32, block_size: 32, max_model_len: 2048, prefix_hash: sha256, hash_seed: 7}\n"
        "pools:\n  prefill: {num_blocks: 64, threads: 3, max_num_batched_tokens: 128}\n"
        "  decode: {kv_memory: 64MiB, block_size: 64, max_num_seqs: 5}\n"
    )
    prefill, decode = (engine_config(config, role, "/m") for role in ROLES)
    assert decode.block_size == 64
    assert (prefill.model, prefill.dtype, prefill.block_size, prefill.hash_seed) == ("/m", "float32", 32, 7)
    assert (prefill.num_blocks, prefill.threads, prefill.max_num_batched_tokens) == (64, 3, 128)
    assert (decode.num_blocks, decode.kv_memory_bytes, decode.max_num_seqs) == (None, 64 << 20, 5)
    assert (decode.prefix_hash, decode.max_model_len) == ("sha256", 2048)


def test_a_profile_fills_what_a_pool_leaves_out_and_gives_way_to_what_it_says() -> None:
    config = config_from_text(
        "pools:\n  profile: disaggregated\n  prefill: {max_num_seqs: 3}\n  decode: {profile: low-latency}\n"
    )
    wanted = {"prefill": profile_settings("disaggregated", "prefill"), "decode": profile_settings("low-latency")}
    assert [config.pools.of(role).profile for role in ROLES] == ["disaggregated", "low-latency"]
    for role in ROLES:
        for name, value in wanted[role].items():
            stated = role == "prefill" and name == "max_num_seqs"
            assert getattr(engine_config(config, role, "/m"), name) == (3 if stated else value)


@pytest.mark.parametrize("key", PROFILE_KEYS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_setting_of_a_profile_can_be_overridden_in_the_file(profile: str, key: str) -> None:
    odd = {int: "17", bool: "false", str: "static"}[type(getattr(PoolSection(), key))]
    text = f"pools:\n  decode:\n    profile: {profile}\n    {key}: {odd}\n"
    assert str(getattr(config_from_text(text).pools.decode, key)).lower() == odd


def test_how_an_engine_schedules_is_said_per_pool() -> None:
    config = config_from_text(
        "model: {weights: dense, kernels: torch}\n"
        "pools:\n  prefill: {batching: static, chunked_prefill: false}\n"
        "  decode: {preemption: swap, swap_memory: 64MiB}\n"
    )
    prefill, decode = (engine_config(config, role, "/m") for role in ROLES)
    assert (prefill.batching, prefill.chunked_prefill, prefill.preemption) == ("static", False, "auto")
    assert (decode.batching, decode.preemption, decode.swap_bytes) == ("continuous", "swap", 64 << 20)
    assert {(one.weights, one.kernels) for one in (prefill, decode)} == {("dense", "torch")}
    words = describe(config)
    assert "Static batches" in words
    assert "without room KV goes to 64 MiB of host memory." in words
    none = config_from_text("pools: {decode: {swap_memory: 0B}}")
    assert engine_config(none, "decode", "/m").swap_bytes == 0


@pytest.mark.parametrize(("transports", "shared"), [("[shm, tcp]", True), ("[ucx, tcp]", False)])
def test_the_pool_is_shared_only_where_peers_map_it(transports: str, shared: bool) -> None:
    config = config_from_text(f"transfer: {{transports: {transports}}}")
    assert {engine_config(config, role, "/m").kv_shared for role in ROLES} == {shared}


def test_workers_have_names_that_stay() -> None:
    assert worker_names(config_from_text("pools: {decode: {count: 2}}"), "decode") == ("decode-0", "decode-1")


def test_every_policy_that_the_file_may_name_exists() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)


def test_the_tables_fill_every_field_of_every_section() -> None:
    def missing(section: Section, skip: set[str]) -> set[str]:
        filled = {entry.field for entry in section.keys.values()}
        lost = {f"{section.make.__name__}.{f.name}" for f in fields(section.make) if f.name not in filled | skip}
        for entry in section.keys.values():
            if isinstance(entry, Section):
                lost |= missing(entry, set())
            elif isinstance(entry, ClassTable):
                lost |= missing(entry.each, {"name"})
        return lost

    assert missing(ROOT, {"warnings", "places"}) == set()


# -- refusals -----------------------------------------------------------------------------------------------------

UNKNOWN_KEYS = {
    "a typo at the top": ("version: 1\nmodle: x\n", 2, "modle", "'model'"),
    "a typo in a section": ("version: 1\nrouting:\n  polcy: sla\n", 3, "routing.polcy", "'policy'"),
    "a typo in a pool": ("pools:\n  prefill:\n    cuont: 2\n", 3, "pools.prefill.cuont", "'count'"),
    "a typo in a class": ("classes:\n  a:\n    tfft: 1s\n", 3, "classes.a.tfft", "'ttft'"),
    "a typo in tls": ("gateway:\n  tls:\n    crt: a\n    cert: a\n    key: b\n", 3, "gateway.tls.crt", "'cert'"),
    "a key one level too high": ("ttft: 200ms\n", 1, "ttft", "classes.<class>"),
    "a key one level too low": ("pools:\n  prefill:\n    classes: {}\n", 3, "pools.prefill.classes", "the top level"),
    "a key of a neighbour section": ("gateway:\n  checksums: true\n", 2, "gateway.checksums", "under transfer"),
    "a hyphen": ("pools:\n  decode:\n    max-num-seqs: 4\n", 3, "pools.decode.max-num-seqs", "'max_num_seqs'"),
    "capitals": ("gateway:\n  HTTP_Port: 80\n", 2, "gateway.HTTP_Port", "'http_port'"),
    "only the beginning of a key": ("gateway:\n  api-key: K\n", 2, "gateway.api-key", "'api_key_env'?"),
    "the beginning of two": ("pools:\n  decode:\n    max: 4\n", 3, "pools.decode.max", "'max_num_batched_tokens' or '"),
    "bytes for memory": ("pools:\n  decode:\n    swap_bytes: 1\n", 3, "pools.decode.swap_bytes", "'swap_memory'"),
    "nothing near": ("cluster:\n  zzzzzz: 1\n", 2, "cluster.zzzzzz", "namespace, ray_address, num_cpus"),
}


@pytest.mark.parametrize(("text", "line", "path", "hint"), UNKNOWN_KEYS.values(), ids=UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_naming_the_nearest(text: str, line: int, path: str, hint: str) -> None:
    said = problem(text)
    assert said.startswith(f"sla.yaml:{line}: {path}: there is no such key here; ")
    assert hint in said


def test_a_key_that_begins_as_written_is_nearer_than_the_same_word_in_another_section() -> None:
    with pytest.raises(ConfigFileError) as refused:
        config_from_text("pools: {decode: {tiers: {host: 1GiB}}}", "sla.yaml")
    unknown, missing = refused.value.problems
    assert unknown.endswith("pools.decode.tiers.host: there is no such key here; did you mean 'host_memory'?")
    assert missing.endswith("needs 'host_memory' too")


BAD_VALUES = {
    "bare duration": ("classes: {a: {ttft: 200}}", "classes.a.ttft: is 200; ", "200ms or 200s?"),
    "bare float duration": ("classes: {a: {itl: 0.2}}", "classes.a.itl: is 0.2; ", "0.2ms or 0.2s?"),
    "bare duration as text": ('classes: {a: {ttft: "200"}}', "classes.a.ttft: is '200'", "200ms, 0.2s"),
    "zero duration": ("classes: {a: {ttft: 0s}}", "classes.a.ttft", "above zero"),
    "negative duration": ("classes: {a: {ttft: -5ms}}", "classes.a.ttft", "above zero"),
    "infinite duration": ("classes: {a: {ttft: .inf}}", "classes.a.ttft", "with its unit"),
    "infinite in words": ("classes: {a: {ttft: infs}}", "classes.a.ttft", "above zero"),
    "unknown unit": ("classes: {a: {ttft: 3 fortnights}}", "classes.a.ttft", "known units: us, ms, s"),
    "boolean duration": ("timeouts: {lease: true}", "timeouts.lease: is True", "above zero"),
    "bare size": ("pools: {decode: {kv_memory: 512}}", "pools.decode.kv_memory: is 512", "512MiB"),
    "unknown size unit": ("pools: {decode: {kv_memory: 512Mb}}", "pools.decode.kv_memory", "known units: B"),
    "zero size": ("pools: {decode: {kv_memory: 0B}}", "pools.decode.kv_memory", "above zero"),
    "text for a count": ("pools: {decode: {count: two}}", "pools.decode.count: is 'two'", "whole number"),
    "empty pool": ("pools: {prefill: {count: 0}}", "pools.prefill.count: is 0", "from 1 to"),
    "fraction for a count": ("pools: {decode: {count: 1.5}}", "pools.decode.count: is 1.5", "whole number"),
    "yes for a count": ("pools: {decode: {count: yes}}", "pools.decode.count: is True", "whole number"),
    "port out of range": ("gateway: {http_port: 99999}", "gateway.http_port", "from 1 to 65535"),
    "unknown policy": ("routing: {policy: fastest}", "routing.policy: is 'fastest'", "sla, round_robin, least_loaded"),
    "unknown policy as a word": ("routing: fastest", "routing: is 'fastest'", "sla, round_robin, least_loaded"),
    "unknown dtype": ("model: {dtype: int3}", "model.dtype: is 'int3'", "float32, bfloat16, float16"),
    "unknown transport": (
        "transfer: {transports: [ucx, carrier-pigeon]}",
        "transfer.transports",
        "shm, ucx, tcp",
    ),
    "transport twice": ("transfer: {transports: [tcp, tcp]}", "transfer.transports", "each once"),
    "no transport": ("transfer: {transports: []}", "transfer.transports: is a list of nothing", "at least one"),
    "text for a list": ("transfer: {transports: ucx}", "transfer.transports: is 'ucx'", "a list"),
    "staging of another kind": ("transfer: {staging: on}", "transfer.staging: is", "auto, always"),
    "checksums of a device": ("transfer: {staging: never, checksums: true}", "transfer.checksums", "leave them off"),
    "number for a boolean": ("transfer: {checksums: 1}", "transfer.checksums: is 1", "true or false"),
    "text for a boolean": ('transfer: {checksums: "no"}', "transfer.checksums: is 'no'", "true or false"),
    "number for a text": ("model: {name: 7}", "model.name: is 7", "in quotes"),
    "empty text": ('model: {name: ""}', "model.name: is ''", "not empty"),
    "list for a section": ("pools: [1, 2]", "pools", "must be a mapping with keys such as profile, prefill, decode"),
    "number for a section": ("model: 7", "model", "must be a mapping"),
    "mapping for a value": ("classes: {a: {ttft: {x: 1}}}", "classes.a.ttft: is a mapping", "above zero"),
    "list for the classes": ("classes: [a]", "classes", "from class names to their promises"),
    "no value": ("model:", "model", "has no value"),
    "no value inside": ("gateway: {host: }", "gateway.host", "has no value"),
    "unknown version": ("version: 2", "version: is 2", "from 1 to 1"),
    "odd class name": ('classes: {"a b": {}}', "classes.a b", "letters, digits"),
    "half of tls": ("gateway: {tls: {cert: a.pem}}", "gateway.tls", "needs 'key' too"),
    "unknown profile": ("pools: {profile: quick}", "pools.profile: is 'quick'", "low-latency, balanced"),
    "unknown profile of a pool": ("pools: {decode: {profile: quick}}", "pools.decode.profile: is 'quick'", "balanced"),
    "unknown batching": ("pools: {decode: {batching: big}}", "pools.decode.batching: is 'big'", "continuous, static"),
    "unknown preemption": ("pools: {decode: {preemption: no}}", "pools.decode.preemption", "auto, recompute, swap"),
    "more than any machine has": ("pools: {decode: {kv_memory: 9999TiB}}", "pools.decode.kv_memory", "at most 1024TiB"),
    "bare swap space": ("pools: {decode: {swap_memory: 64}}", "pools.decode.swap_memory: is 64", "64MiB or 64B?"),
    "swapping to nowhere": (
        "pools: {decode: {preemption: swap, swap_memory: 0B}}",
        "pools.decode.swap_memory: is 0; ",
        "positive when preemption is swap",
    ),
    "packed weights on a GPU": (
        "model: {weights: packed, device: cuda}",
        "model.weights: is 'packed'",
        "dense or auto",
    ),
    "relative folder": (
        "pools: {decode: {tiers: {host_memory: 1GiB, disk_path: kv}}}",
        "pools.decode.tiers.disk_path: is 'kv'",
        "an absolute path",
    ),
    "block sizes that do not fit": (
        "pools: {prefill: {block_size: 48}, decode: {block_size: 32}}",
        "pools.prefill.block_size: the larger block size must be a multiple of the smaller",
        "48 for prefill, 32 for decode",
    ),
    "odd block size of a pool": ("pools: {decode: {block_size: 24}}", "pools.decode.block_size", "multiple of 16"),
    "odd block size": ("model: {block_size: 24}", "model.block_size", "multiple of 16"),
    "same port twice": ("gateway: {http_port: 80, grpc_port: 80}", "gateway.grpc_port", "differ from http_port"),
    "fence before suspect": ("timeouts: {suspect: 9s, fence: 3s}", "timeouts", "shorter than"),
    "back-off above its bound": ("timeouts: {restart_backoff: 50s}", "timeouts.restart_backoff", "not exceed"),
}


@pytest.mark.parametrize(("text", "start", "remedy"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_value_is_refused_with_what_it_must_be(text: str, start: str, remedy: str) -> None:
    said = problem(text)
    assert said.startswith(f"sla.yaml:1: {start}")
    assert remedy in said


BAD_FILES = {
    "empty": ("", 1, "the file is empty"),
    "comments only": ("# nothing\n\n", 1, "the file is empty"),
    "a list": ("- version\n", 1, "the top level must be a mapping"),
    "a word": ("hello\n", 1, "the top level must be a mapping"),
    "a duplicate at the top": ("version: 1\nmodel: a\nmodel: b\n", 3, "'model' is given twice, first in line 2"),
    "a duplicate inside": ("classes:\n  a:\n    ttft: 1s\n    ttft: 2s\n", 4, "'ttft' is given twice"),
    "a class twice": ("classes:\n  a: {}\n  a: {}\n", 3, "'a' is given twice"),
    "bad indent": ("pools:\n  prefill:\n    count: 1\n   threads: 2\n", 4, "check the indentation"),
    "a tab": ("pools:\n\tprefill: {}\n", 2, "not valid YAML"),
    "an open bracket": ("transfer: {transports: [ucx\n", 2, "not valid YAML"),
    "two documents": ("version: 1\n---\nversion: 1\n", 2, "not valid YAML"),
    "an object tag": ("model: !!python/object/apply:os.system [id]\n", 1, "must be a mapping"),
    "a scalar with a tag": ("model: {name: !!python/name:os.system ''}\n", 1, "not valid YAML"),
    "an alias": ("model: &a {name: x}\ncluster: *a\n", 2, "aliases"),
    "a key that is a list": ("? [a, b]\n: 1\n", 1, "a key must be a single word"),
    "a control character": ("model: \x07\n", 1, "not valid YAML"),
}


@pytest.mark.parametrize(("text", "line", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_sla_file_is_refused(text: str, line: int, reason: str) -> None:
    said = problem(text)
    assert said.startswith(f"sla.yaml:{line}: ")
    assert reason in said


def test_all_problems_of_a_file_are_told_at_once() -> None:
    said = problems("modle: x\nrouting: {policy: slow}\nclasses:\n  a: {ttft: 1}\n")
    assert [line.split(":")[1] for line in said] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "this is a directory"),
        (lambda path: path.write_bytes(b"model: \xff\xfe"), "not UTF-8"),
        (lambda path: path.write_text("#" * (2 << 20)), "larger than"),
    ],
    ids=["missing", "directory", "binary", "huge"],
)
def test_a_path_that_cannot_be_read_is_refused_by_name(tmp_path: Path, make: object, reason: str) -> None:
    path = tmp_path / "x.sla.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigFileError, match=reason) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


# -- doubts -------------------------------------------------------------------------------------------------------

DOUBTS = {
    "ttft below a millisecond": (
        "classes:\n  a: {ttft: 200us}\n",
        "sla.yaml:2: classes.a.ttft: 0.0002 s is implausible",
    ),
    "ttft above ten minutes": (
        "classes: {a: {ttft: 200000s, timeout: 60h}}",
        "classes.a.ttft: 200000 s is implausible",
    ),
    "itl of minutes": ("classes: {a: {itl: 5m}}", "classes.a.itl: 300 s is implausible"),
    "timeout before the first token": ("classes: {a: {ttft: 20s, timeout: 10s}}", "the timeout (10 s) comes before it"),
    "exchanged": ("classes: {a: {ttft: 50ms, itl: 2s}}", "are they exchanged?"),
    "two sizes for one pool": (
        "pools:\n  decode:\n    num_blocks: 64\n    kv_memory: 1GiB\n",
        "sla.yaml:4: pools.decode.kv_memory: has no effect beside num_blocks",
    ),
    "swap space that nobody uses": (
        "pools:\n  decode:\n    preemption: recompute\n    swap_memory: 1GiB\n",
        "sla.yaml:4: pools.decode.swap_memory: has no effect with preemption: recompute",
    ),
    "disk space nowhere": (
        "pools:\n  prefill:\n    tiers:\n      host_memory: 1GiB\n      disk_space: 9GiB\n",
        "sla.yaml:5: pools.prefill.tiers.disk_space: has no effect without disk_path",
    ),
    "tiers of no cache": (
        "model: {prefix_caching: false}\npools: {decode: {tiers: {host_memory: 1GiB}}}",
        "sla.yaml:2: pools.decode.tiers: has no effect with prefix_caching: false",
    ),
    "more sequences than tokens": (
        "pools:\n  decode:\n    max_num_batched_tokens: 32\n",
        "sla.yaml:3: pools.decode.max_num_batched_tokens: 32 tokens a step are too few for 64 sequences",
    ),
    "open to others without a key": ("gateway: {host: 0.0.0.0}", "no api_key_env is set"),
}


@pytest.mark.parametrize(("text", "doubt"), DOUBTS.values(), ids=DOUBTS)
def test_what_looks_like_a_slip_is_allowed_with_a_warning(text: str, doubt: str) -> None:
    config = config_from_text(text, "sla.yaml")
    assert any(doubt in warning for warning in config.warnings), config.warnings
    assert "Warning: " in describe(config)


def test_the_words_tell_counts_promises_and_where_it_listens() -> None:
    config = config_from_text(
        "pools: {prefill: {count: 2}}\nclasses: {chat: {ttft: 500ms, itl: 80ms, priority: 5, timeout: 2m}}\n"
    )
    words = describe(config)
    assert "Prefill: 2 workers" in words
    assert "Decode: 1 worker, " in words
    assert "Class chat: first token within 500 ms, then one every 80 ms; priority 5, ended after 120 s." in words
    assert "127.0.0.1: HTTP on port 8000, gRPC on port 50051" in words


def test_a_model_that_is_not_here_is_doubted_where_it_is_checked(tmp_path: Path) -> None:
    assert doubts_here(default_config()) == ()
    assert doubts_here(config_from_text(f"model: {{path: {tmp_path}}}")) == ()
    gone = config_from_text(f"model: {{path: {tmp_path / 'gone'}}}")
    assert gone.warnings == ()
    (doubt,) = doubts_here(gone)
    assert doubt.startswith("model.path: ")
    assert str(tmp_path / "gone") in doubt
    (doubt,) = doubts_here(config_from_text("model: my-llama"))
    assert "model.path" in doubt


def test_more_kv_or_threads_than_this_machine_has_are_doubted_with_their_place() -> None:
    doubts = doubts_here(config_from_text("pools: {prefill: {kv_memory: 90000GiB}, decode: {count: 2, threads: 4000}}"))
    assert [doubt.partition(":")[0] for doubt in doubts] == ["pools.prefill.kv_memory", "pools.decode.threads"]
    assert "1 times 90000 GiB is more than the" in doubts[0]
    on_a_gpu = config_from_text("model: {device: cuda}\npools: {prefill: {kv_memory: 90000GiB}}")
    assert doubts_here(on_a_gpu) == ()


def test_host_memory_of_tiers_is_doubted_when_this_machine_has_not_that_much_alone_or_beside_the_kv_cache() -> None:
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def doubts(host_bytes: int, kv_bytes: int = 1 << 20, count: int = 1, device: str = "cpu") -> list[str]:
        pool = f"{{count: {count}, kv_memory: {kv_bytes}B, tiers: {{host_memory: {host_bytes}B}}}}"
        return list(doubts_here(config_from_text(f"model: {{device: {device}}}\npools: {{decode: {pool}}}")))

    assert doubts(here // 2, here // 4) == []
    for too_much in (doubts(here * 2), doubts(here * 2 // 3, count=2), doubts(here * 2, device="cuda")):
        (doubt,) = too_much
        assert doubt.startswith("pools.decode.tiers.host_memory: ")
        assert doubt.endswith(f"is more than the {here >> 30} GiB of this machine")
    (doubt,) = doubts(here // 2, here * 2 // 3)
    assert doubt.startswith("pools.decode.tiers.host_memory: 1 times ")
    assert " of KV cache is more than the " in doubt
    assert doubts(here // 2, here * 2 // 3, device="cuda") == [], "there the KV cache is elsewhere"
    (doubt,) = doubts(1 << 20, here * 2)
    assert doubt.startswith("pools.decode.kv_memory: "), "a small tier is not what is too large"


def test_a_check_doubts_a_disk_tier_that_can_have_no_folder_here(tmp_path: Path) -> None:
    def doubts(folder: Path) -> tuple[str, ...]:
        tiers = f"{{host_memory: 1GiB, disk_path: {folder}}}"
        return doubts_here(config_from_text(f"pools: {{prefill: {{tiers: {tiers}}}}}"))

    assert doubts(tmp_path / "not" / "made" / "yet") == ()
    taken = tmp_path / "file"
    taken.touch()
    for folder in (taken, taken / "below"):
        (doubt,) = doubts(folder)
        assert doubt.startswith(f"pools.prefill.tiers.disk_path: {taken} is no folder")
    (doubt,) = doubts(Path("/proc/nope"))
    as_whom = "no place for files" if os.access("/proc", os.W_OK) else "not writable"
    assert doubt.startswith(f"pools.prefill.tiers.disk_path: /proc is {as_whom} on this machine: no KV is kept there")


def test_a_check_doubts_network_devices_that_are_not_here() -> None:
    def doubts(devices: str) -> tuple[str, ...]:
        return doubts_here(config_from_text(f"transfer: {{net_device: '{devices}'}}"))

    assert doubts("lo") == ()
    assert [doubt.partition(" on this")[0] for doubt in doubts("lo,mlx5_99:1,nope0,../lo")] == [
        f"transfer.net_device: there is no {absent}" for absent in ("mlx5_99", "nope0", "../lo")
    ]


def test_a_config_is_a_value() -> None:
    assert config_from_text("model: x") == config_from_text("model: x")
    assert TandemConfig() == default_config()
