"""The store of responses, against one that forgets nothing but what it should."""

from collections import OrderedDict

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_paged_attention.api.server.responses.store import ResponseStore, StoredResponse

OWNERS = st.sampled_from([None, "a"])
IDS = st.integers(0, 4).map("r{}".format)


class Stores(RuleBasedStateMachine):
    """Puts, reads and deletes; the model keeps everything in the order of its last use and evicts by hand."""

    @initialize(entries=st.integers(0, 5), size=st.integers(0, 99))
    def begin(self, entries: int, size: int) -> None:
        self.entries, self.size = entries, size
        self.store = ResponseStore(max_responses=entries, max_bytes=size)
        self.model: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()
        self.made = 0

    @rule(owner=OWNERS, response_id=IDS, sizes=st.tuples(st.integers(0, 30), st.integers(0, 40)))
    def put(self, owner: str | None, response_id: str, sizes: tuple[int, int]) -> None:
        if (owner, response_id) in self.model:
            return
        self.made += 1
        items = (f"i{self.made}", f"j{self.made}")
        stored = StoredResponse(b"x" * sizes[0], b"y" * sizes[1], items)
        assert self.store.fits(stored) == (sum(sizes) <= self.size)
        if not self.store.fits(stored):
            return
        self.store.put(owner, response_id, stored)
        self.model[owner, response_id] = stored
        while len(self.model) > self.entries or sum(s.num_bytes for s in self.model.values()) > self.size:
            self.model.popitem(last=False)

    @rule(owner=OWNERS, response_id=IDS)
    def get(self, owner: str | None, response_id: str) -> None:
        assert self.store.get(owner, response_id) is self.model.get((owner, response_id))
        if (owner, response_id) in self.model:
            self.model.move_to_end((owner, response_id))

    @rule(owner=OWNERS, number=st.integers(1, 9), letter=st.sampled_from("ij"))
    def find_an_item(self, owner: str | None, number: int, letter: str) -> None:
        item_id = f"{letter}{number}"
        holders = [key for key, s in self.model.items() if key[0] == owner and item_id in s.output_ids]
        found = self.store.maker(owner, item_id)
        assert found is (self.model[holders[0]] if holders else None)
        for key in holders:
            self.model.move_to_end(key)

    @rule(owner=OWNERS, response_id=IDS)
    def delete(self, owner: str | None, response_id: str) -> None:
        assert self.store.delete(owner, response_id) == ((owner, response_id) in self.model)
        self.model.pop((owner, response_id), None)

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "store"):
            assert len(self.store) == len(self.model) <= self.entries
            assert len(self.store._makers) == 2 * len(self.model)
            assert self.store.num_bytes == sum(s.num_bytes for s in self.model.values()) <= self.size


TestStores = Stores.TestCase
