"""The decode side of a worker: room for expected requests, leases on KV blocks, token streams."""
