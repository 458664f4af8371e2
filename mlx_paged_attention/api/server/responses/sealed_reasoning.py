"""Sealed reasoning: ``encrypted_content``, which clients without a store send back with the next turn.

It is opaque to them and no secret: what it holds is told beside it in plain words.
"""

import base64
import binascii

_MARK = "mlx-paged-1:"


def seal(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``."""
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unseal(encrypted_content: str) -> str | None:
    """The reasoning; ``None`` if it was not sealed here, as when a conversation began with another server."""
    if not encrypted_content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(encrypted_content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
