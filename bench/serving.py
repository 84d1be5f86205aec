"""`tandem serve` in a process of its own, for benchmarks that need the whole cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S, STOP_S = 240.0, 60.0


@contextmanager
def serving(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Run the command until the block ends; its process id once it serves. Raises RuntimeError when it does not."""
    with log.open("w") as out:
        serve = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
    try:
        end_s = time.monotonic() + START_S
        while "ready: HTTP" not in log.read_text():
            if serve.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"tandem serve did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield serve.pid
    finally:
        serve.terminate()
        serve.wait(STOP_S)
