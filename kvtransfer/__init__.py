"""KV transfer: bytes from one worker's pool into another's. It does not know what a token or a model is.

Usable alone; a region is any writable memory, a transport any of `kvtransfer.select`:

    pool = numpy.zeros(pool_bytes, numpy.uint8)
    engine = TransferEngine("decode-0#1", pool.data, [make_transport("tcp", "decode-0#1", pool.data)])

The destination opens a lease (`open`) and tells the source, over a road of its own, the lease's key and
`engine.addresses()`. The source calls `connect`, then `push`. Both call `poll` for what happened, and give memory to
somebody else only after `Quiet`. Read `types` for the values, `engine` for the rules, `wired` for the protocol between
processes, `transport` for what a new transport must do.
"""
