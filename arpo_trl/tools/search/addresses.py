"""Which addresses a model may make this machine connect to: public ones only.

[`PublicTransport`] resolves the host of every request, refuses it if any of its addresses is not public, and connects
to one of the addresses it has checked, never to the name again, so that a name which answers differently the second
time (DNS rebinding) gains nothing. Redirects are requests of their own and are checked like the first. No proxy is
used: behind one, the proxy would resolve the name.
"""

import asyncio
import ipaddress
import socket

import httpx

from ..contract import ToolError


# Public by their number, but answered by the cloud's own host: Azure's metadata and wire server.
_CLOUD_INTERNAL = frozenset({ipaddress.ip_address("168.63.129.16")})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

# Made once: reading the certificates takes as long as fetching a page.
_TLS = httpx.create_ssl_context()


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, loopback, link-local (where clouds serve
    metadata), shared, multicast or reserved, and not an IPv6 address that leads to such an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inside = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inside.append(ipaddress.IPv4Address(ip.packed[-4:]))
        if not all(is_public(str(ipv4)) for ipv4 in inside if ipv4 is not None):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast and ip not in _CLOUD_INTERNAL


class PublicTransport(httpx.AsyncBaseTransport):
    """Sends requests to public addresses only.

    Args:
        allow_private_addresses (`bool`, *optional*, defaults to `False`):
            Connects to whatever a name resolves to. For tests and for pages of one's own network.
    """

    def __init__(self, allow_private_addresses: bool = False):
        self.allow_private_addresses = allow_private_addresses
        # A connection is made for one name: one that is kept could serve another name at the same address.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(verify=_TLS, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the request to an address of its host.

        Raises:
            [`ToolError`]: where the host has an address that is not public.
            `httpx.ConnectError`: where it cannot be resolved or reached.
        """
        host = request.url.raw_host.decode("ascii")
        addresses = await self._resolve(host, request)
        refused = [address for address in addresses if not (self.allow_private_addresses or is_public(address))]
        if refused:
            raise ToolError(f"{host} is not a public address; only pages of the public internet can be read.")
        for last, address in enumerate(addresses, 1 - len(addresses)):
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # `Host` among them
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return await self._transport.handle_async_request(pinned)
            except httpx.ConnectError:
                if last == 0:
                    raise
        raise httpx.ConnectError(f"{host} has no address.", request=request)

    async def _resolve(self, host: str, request: httpx.Request) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} cannot be resolved: {error}", request=request) from None
        return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))

    async def aclose(self) -> None:
        await self._transport.aclose()
