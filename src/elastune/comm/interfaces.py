"""The network interface by which a machine's workers are reached, and its address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

from elastune.core.errors import UserError

SIOCGIFADDR = 0x8915  # <linux/sockios.h>
LINK_LOCAL_SCOPE = "20"  # <net/ipv6.h>, as /proc/net/if_inet6 tells it


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this machine, IPv4 before IPv6; link-local ones of IPv6 are left out."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != LINK_LOCAL_SCOPE and name in found:
                found[name].append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def interface_with(address: str) -> str:
    """The interface that has ``address``. Raises ``UserError``."""
    wanted = ipaddress.ip_address(address)
    mapped = getattr(wanted, "ipv4_mapped", None)
    known = addresses()
    for name, own in known.items():
        if str(mapped or wanted) in own or (wanted.is_loopback and name == "lo"):
            return name
    raise UserError("an address must be this machine's", address, f"choose by --interface: {', '.join(known)}")


def address_of(interface: str) -> str:
    """The first address of ``interface``. Raises ``UserError``."""
    known = addresses()
    if not known.get(interface):
        having = ", ".join(name for name, own in known.items() if own)
        raise UserError("--interface must name one of this machine's with an address", interface, f"such as {having}")
    return known[interface][0]
