"""Lower tiers of KV: blocks that fall out of a worker's pool go to host memory, and from there to disk.

Keys are bytes, values are blocks of one fixed size; what a token or a model is, is not known here. Usable alone:

    store = TierStore(block_bytes, TierSettings(host_bytes=1 << 30, disk_path="/scratch/kv"), fingerprint="whose")
    store.put(key, block)                      # copied before it returns
    load = store.open(keys, deadline_s)        # of keys for which `where` named a tier
    store.deliver(load, write, most)           # as blocks arrive, in order; then `close`
    store.poll(now)                            # now and then, and when `wake` was called

A failed tier is a miss, a counter and a line in the log, never an exception. Read `store` for the whole, `host` and
`disk` for the two tiers, `block_file` for what lies on disk, `io_thread` for who waits for the disk.
"""
