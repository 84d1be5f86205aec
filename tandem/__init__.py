"""Tandem's public face. `from tandem import Client` is all that a user of a running cluster needs."""
