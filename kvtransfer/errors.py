"""Errors of the transfer engine."""


class TransferError(Exception):
    """A transfer, an address or a peer cannot be used; the message says which and what to do."""
