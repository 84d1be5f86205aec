"""The peers of `bench.transfer`, run by the peers' own Python: `python transfer_peers.py ROLE PEER`.

It stands alone: this environment has NIXL and Mooncake and nothing of ours. Two processes per peer, as for us: the
`target` fills a pool, registers it and says where it lies; the `initiator` reads random lists of its blocks into random
blocks of its own. Lines of JSON on standard input and output:

    target     → {"address": …, "metadata": …}                      then it serves until its input ends
    initiator  ← the same line, then per round {"reads": [offset, …], "writes": [offset, …], "block_bytes": n}
               → {"seconds": s}                                      from the lists to the last byte

A round includes what a program must do for a list it has not seen before (descriptors, request), as ours does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MOONCAKE_BATCH = 128
"""Over TCP it opens connections per request of a batch; thousands in one batch fail."""

Move = Callable[[list[int], list[int], int], None]


def pool_of(num_bytes: int, value: int) -> np.ndarray:
    return np.full(num_bytes, value, np.uint8)


def nixl_agent(name: str, options: dict[str, str]) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("UCX", options)
    return agent


def nixl_target(pool: np.ndarray, options: dict[str, str]) -> tuple[dict[str, Any], Callable[[], None]]:
    agent = nixl_agent("target", options)
    registered = agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    where = {"address": pool.ctypes.data, "metadata": agent.get_agent_metadata().hex()}
    return where, lambda: agent.deregister_memory(registered)


def nixl_initiator(pool: np.ndarray, options: dict[str, str], where: dict[str, Any]) -> Move:
    agent = nixl_agent("initiator", options)
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    agent.add_remote_agent(bytes.fromhex(where["metadata"]))

    def descriptors(base: int, offsets: list[int], block_bytes: int) -> Any:
        rows = np.zeros((len(offsets), 3), np.uint64)
        rows[:, 0] = np.asarray(offsets, np.uint64) + np.uint64(base)
        rows[:, 1] = block_bytes
        return agent.get_xfer_descs(rows, "DRAM")

    def move(reads: list[int], writes: list[int], block_bytes: int) -> None:
        theirs = descriptors(where["address"], reads, block_bytes)
        ours = descriptors(pool.ctypes.data, writes, block_bytes)
        handle = agent.initialize_xfer("READ", ours, theirs, "target")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")

    return move


def mooncake_engine(name: str) -> Any:
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize(name, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("Mooncake does not start")
    return engine


def mooncake_target(pool: np.ndarray, options: dict[str, str]) -> tuple[dict[str, Any], Callable[[], None]]:
    engine = mooncake_engine("127.0.0.1:0")
    engine.register_memory(pool.ctypes.data, pool.nbytes)
    where = {"address": pool.ctypes.data, "metadata": f"127.0.0.1:{engine.get_rpc_port()}"}
    return where, lambda: engine.unregister_memory(pool.ctypes.data)


def mooncake_initiator(pool: np.ndarray, options: dict[str, str], where: dict[str, Any]) -> Move:
    engine = mooncake_engine("127.0.0.1:0")
    engine.register_memory(pool.ctypes.data, pool.nbytes)

    def move(reads: list[int], writes: list[int], block_bytes: int) -> None:
        theirs = [where["address"] + offset for offset in reads]
        ours = [pool.ctypes.data + offset for offset in writes]
        for start in range(0, len(reads), MOONCAKE_BATCH):
            batch = slice(start, start + MOONCAKE_BATCH)
            lengths = [block_bytes] * len(ours[batch])
            if engine.batch_transfer_sync_read(where["metadata"], ours[batch], theirs[batch], lengths):
                raise RuntimeError("Mooncake: the read failed")

    return move


PEERS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "nixl": (nixl_target, nixl_initiator, {}),
    "mooncake": (mooncake_target, mooncake_initiator, {}),
}
"""Target, initiator, options. NIXL over TCP is `nixl` with UCX_TLS=tcp in the environment."""


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(role: str, peer: str, pool_bytes: int) -> None:
    """The process."""
    target, initiator, options = PEERS[peer]
    if role == "target":
        pool = pool_of(pool_bytes, 7)
        where, end = target(pool, options)
        say(where)
        sys.stdin.read()
        end()
        return
    pool = pool_of(pool_bytes, 0)
    move = initiator(pool, options, json.loads(sys.stdin.readline()))
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        start_s = time.perf_counter()
        move(asked["reads"], asked["writes"], asked["block_bytes"])
        seconds = time.perf_counter() - start_s
        moved = all(pool[offset] == 7 for offset in asked["writes"])
        say({"seconds": seconds, "moved": moved})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
