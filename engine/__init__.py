"""The engine: one worker's model, KV cache and scheduler. It does not know that a network exists."""
