"""ResponseStore: the last responses, for clients that go on from one of them by its id."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    Attributes:
        response: the response object, as JSON.
        conversation: the items up to and with its output, as JSON: what the next turn goes on from.
        output_ids: the ids of its output's items.
    """

    response: bytes
    conversation: bytes
    output_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """What it counts for; the objects around the bytes are small beside them."""
        return len(self.response) + len(self.conversation)


class ResponseStore:
    """Keeps what was used last, within limits; whoever asks finds only what is their own.

    It lies in memory and ends with the server.

    Args:
        max_responses: more are not kept.
        max_bytes: of all together; a single larger one is not kept at all.

    Attributes:
        num_bytes: of what is kept.
    """

    def __init__(self, max_responses: int = 1000, max_bytes: int = 64 << 20) -> None:
        self.num_bytes = 0
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()  # by owner and id
        self._makers: dict[tuple[str | None, str], str] = {}  # by owner and item id: the response's id

    def __len__(self) -> int:
        return len(self._kept)

    def fits(self, stored: StoredResponse) -> bool:
        """Whether it can be kept."""
        return stored.num_bytes <= self._max_bytes

    def put(self, owner: str | None, response_id: str, stored: StoredResponse) -> None:
        """Keep a response under a new id. The least recently used make room."""
        assert self.fits(stored)
        assert (owner, response_id) not in self._kept
        self._kept[owner, response_id] = stored
        self.num_bytes += stored.num_bytes
        for item_id in stored.output_ids:
            self._makers[owner, item_id] = response_id
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self._drop(*next(iter(self._kept)))

    def get(self, owner: str | None, response_id: str) -> StoredResponse | None:
        """The owner's response of this id, if it is still there."""
        stored = self._kept.get((owner, response_id))
        if stored is not None:
            self._kept.move_to_end((owner, response_id))
        return stored

    def maker(self, owner: str | None, item_id: str) -> StoredResponse | None:
        """The owner's response that has this item in its output, if it is still there."""
        response_id = self._makers.get((owner, item_id))
        return None if response_id is None else self.get(owner, response_id)

    def delete(self, owner: str | None, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        if (owner, response_id) not in self._kept:
            return False
        self._drop(owner, response_id)
        return True

    def _drop(self, owner: str | None, response_id: str) -> None:
        stored = self._kept.pop((owner, response_id))
        self.num_bytes -= stored.num_bytes
        for item_id in stored.output_ids:
            del self._makers[owner, item_id]
