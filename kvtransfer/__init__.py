"""KV transfer: bytes from one worker's pool into another's. It does not know what a token or a model is."""
