"""The prefill side of a worker: takes prompts in, computes them in chunks, hands their KV to a decode worker."""
