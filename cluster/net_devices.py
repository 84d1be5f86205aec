"""The network devices of this machine, by name: where a worker's KV goes, when `transfer.net_device` says so."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

INTERFACES, RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")

_SIOCGIFADDR = 0x8915
"""Linux: an interface's IPv4 address; see netdevice(7)."""


def missing(devices: str) -> tuple[str, ...]:
    """Which of the devices (`eth0`, or UCX's list, `mlx5_0:1,eth0`) this machine has not."""
    names = [device.strip().partition(":")[0] for device in devices.split(",")]
    return tuple(name for name in names if not _exists(name))


def ipv4_of(devices: str) -> str | None:
    """The address of the first of the devices that is a network interface with one: what sockets bind."""
    names = [device.strip() for device in devices.split(",")]
    return next(filter(None, map(_ipv4, filter(_is_interface, names))), None)


def _exists(name: str) -> bool:
    return _is_interface(name) or (_is_name(name) and (RDMA / name).exists())


def _is_interface(name: str) -> bool:
    return _is_name(name) and (INTERFACES / name).exists()


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            told = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(told[20:24])
