"""Each `Code` has one HTTP status and one gRPC code, so that both front ends say the same of the same fault.

gRPC codes are names here: only servers and clients import `grpc`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.messages import Code

_STATUS: Mapping[Code, tuple[int, str]] = {
    Code.INVALID: (400, "INVALID_ARGUMENT"),
    Code.NOT_FOUND: (404, "NOT_FOUND"),
    Code.NO_ROOM: (429, "RESOURCE_EXHAUSTED"),
    Code.UNAVAILABLE: (503, "UNAVAILABLE"),
    Code.DEADLINE: (504, "DEADLINE_EXCEEDED"),
    Code.ABORTED: (499, "CANCELLED"),
    # Between workers only. When a client sees one after all, asking again finds a fresh lease or worker ...
    Code.STALE: (503, "UNAVAILABLE"),
    # ... but nothing that a client does mends a cluster of two models.
    Code.MISMATCH: (500, "INTERNAL"),
    Code.INTERNAL: (500, "INTERNAL"),
}

HTTP_STATUS: Mapping[Code, int] = {code: http for code, (http, _) in _STATUS.items()}
GRPC_STATUS: Mapping[Code, str] = {code: grpc for code, (_, grpc) in _STATUS.items()}
