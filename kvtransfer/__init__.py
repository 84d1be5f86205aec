"""KV transfer: bytes from one worker's pool into another's. It does not know what a token or a model is.

Usable alone: it needs numpy, xxhash and msgpack, for `ucx` also ucxx-cu12 or ucxx-cu13, and a C compiler, looked for at
the first use, for the quick copy of `shm` (see `copying`; without one numpy copies). A region is a writable memoryview
of single bytes, a transport any of `kvtransfer.select`; here both ends:

    from threading import Event

    from kvtransfer.engine import TransferEngine
    from kvtransfer.memory import SharedMemory
    from kvtransfer.select import choose, make_transport
    from kvtransfer.types import LeaseKey, PushDone, Quiet, Received, Span

    news = Event()

    def opened(me, schemes=("shm", "tcp")):                     # the best first
        pool = memoryview(SharedMemory(1 << 20))                # `shm` needs these, others take any bytes
        transports = [make_transport(scheme, me, pool) for scheme in schemes]
        return pool, TransferEngine(me, pool, transports, wake=news.set)

    key = LeaseKey("request 1", generation=1)
    decode_pool, decode = opened("decode-0#1")                  # name#incarnation: restarted, it is another peer
    decode.open(key, "prefill-0#1", [Span(0, 4096), Span(8192, 4096)])

    prefill_pool, prefill = opened("prefill-0#1")
    prefill_pool[4096:8192] = b"k" * 4096
    addresses = dict(decode.addresses())                        # and the key: over a road of your own, encrypted
    scheme = choose(("shm", "tcp"), addresses)
    prefill.connect("decode-0#1", scheme, addresses[scheme])
    prefill.push(key, "decode-0#1", 1, [Span(4096, 4096)], deadline_s=5.0)    # into the lease's span 1

    def told(kind, engine):                                     # a real owner has other work, and all kinds of events
        while not (found := [event for event in engine.poll() if isinstance(event, kind)]):
            news.wait(0.1)
            news.clear()
        return found[0]

    print(told(Received, decode), told(PushDone, prefill))
    decode.close(key)                                           # no more bytes ...
    prefill.withdraw(key)
    print(told(Quiet, decode), told(Quiet, prefill))            # ... and from now on the memory may be anybody's
    assert decode_pool[8192:12288] == prefill_pool[4096:8192]
    prefill.shutdown()
    decode.shutdown()

What may go wrong comes as `PushFailed`, `ReceiveFailed` and `PeerLost`; after each, `close` or `withdraw`, and wait for
`Quiet`. Read `types` for the values, `engine` for the rules, `wired` for the protocol between processes, `transport`
for what a new transport must do, and `tiers` for memory below the pool.
"""
