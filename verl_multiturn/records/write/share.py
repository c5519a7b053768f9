"""`in_share`: which groups have their conversations recorded (`record_share`).

A group is drawn by its uid alone, so that all processes of a run record the same groups, each of them whole. A larger
share has the groups of a smaller one.
"""

from __future__ import annotations

import hashlib

NO_SHARE = "its group is not in record_share"
"""Why a record is not kept that was not drawn."""


def in_share(uid: str, share: float) -> bool:
    """Return whether a group's records are kept; the same in all processes."""
    drawn = hashlib.blake2b(uid.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(drawn) < share * (1 << 64)
