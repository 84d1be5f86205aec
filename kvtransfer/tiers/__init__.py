"""Lower tiers of KV: blocks that fall out of a worker's pool go to host memory, and from there to disk.

Keys are bytes (64 at most), values are blocks of one fixed size; what a token or a model is, is not known here. Usable
alone; `folder` is a directory of this process only:

    import time
    from threading import Event

    from kvtransfer.tiers.store import TierStore
    from kvtransfer.tiers.types import TierSettings

    news, got = Event(), []
    settings = TierSettings(host_bytes=1 << 20, disk_path=folder, disk_bytes=1 << 26)
    store = TierStore(4096, settings, fingerprint="whose blocks these are", wake=news.set)
    store.put(b"key", memoryview(b"v" * 4096))                  # copied before it returns
    print(store.where([b"key", b"another"]))                    # the tiers of the leading keys that are there
    load = store.open([b"key"], deadline_s=time.monotonic() + 1.0)
    while not store.ended(load):                                # a real owner has other work meanwhile
        if not store.deliver(load, lambda index, block: got.append(bytes(block)), most=8):
            news.wait(0.1)
            news.clear()
            store.poll(time.monotonic())
    store.close(load)                                           # what did not come by now is a miss
    store.shutdown()

A failed tier is a miss, a counter and a line in the log, never an exception. Read `store` for the whole, `host` and
`disk` for the two tiers, `block_file` for what lies on disk, `io_thread` for who waits for the disk.
"""
