"""Sets of chains as integers: one bit for each chain that shares a block."""

from heapq import heappop, heappush
from itertools import compress
from typing import Final

from vllm_agent_hint.sessions.lineage import Chain

ChainSet = int
"""A set of chains. Means something only together with the ``ChainBits`` that made it."""

_ZERO_IS_FALSE: Final = bytes.maketrans(b"0", b"\0")


class ChainBits:
    """Gives chains their bits.

    A thousand sessions may share a prefix, and the set of them stands at each of its blocks. As
    an integer it takes 133 bytes, and it is joined, left, compared and looked up in a hundred
    nanoseconds, where a ``frozenset`` takes 32 KiB and ten microseconds. Bits of chains that
    share nothing any more are given out again, the lowest first, so that sets stay short.
    """

    def __init__(self) -> None:
        self._bits: dict[Chain, ChainSet] = {}
        self._chains: list[Chain | None] = []
        """The chain of each bit."""
        self._vacant: list[int] = []
        """Numbers of bits that no chain has, as a heap."""
        self._of_tenants: dict[str, ChainSet] = {}

    def bit(self, chain: Chain) -> ChainSet:
        """The set that holds only this chain; gives it a bit if it has none."""
        bit = self._bits.get(chain)
        if bit is None:
            if self._vacant:
                number = heappop(self._vacant)
                self._chains[number] = chain
            else:
                number = len(self._chains)
                self._chains.append(chain)
            bit = self._bits[chain] = 1 << number
            tenant = chain.lineage.session.tenant
            self._of_tenants[tenant] = self._of_tenants.get(tenant, 0) | bit
        return bit

    def bit_if_any(self, chain: Chain) -> ChainSet:
        """The set that holds only this chain; empty if the chain is in none."""
        return self._bits.get(chain, 0)

    def vacate(self, chain: Chain) -> None:
        """Take a chain's bit back: it is in no set any more. No-op if it has none."""
        bit = self._bits.pop(chain, 0)
        if bit:
            number = bit.bit_length() - 1
            self._chains[number] = None
            heappush(self._vacant, number)
            tenant = chain.lineage.session.tenant
            left = self._of_tenants[tenant] ^ bit
            if left:
                self._of_tenants[tenant] = left
            else:
                del self._of_tenants[tenant]

    def of_tenant(self, tenant: str) -> ChainSet:
        """All chains of a tenant that have a bit."""
        return self._of_tenants.get(tenant, 0)

    def members(self, chains: ChainSet) -> tuple[Chain, ...]:
        """The chains of a set. O(bits given out), some 10 ns each."""
        digits = f"{chains:b}"[::-1].encode().translate(_ZERO_IS_FALSE)
        return tuple(chain for chain in compress(self._chains, digits) if chain is not None)

    def only_member(self, chains: ChainSet) -> Chain | None:
        """The chain of a set that holds one; None if it holds more."""
        if chains & (chains - 1):
            return None
        return self._chains[chains.bit_length() - 1]
