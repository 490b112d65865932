"""A token-exact radix tree over one pool of numbered places: the index under `token` and `paged`.

    root ── "system prompt" ──┬── "question one" ── "answer one"
                              └── "question two"

A node is an edge of the tree: a run of tokens (raw int32 bytes, compared as bytes) and the places that hold them.
What a place is, the policy decides: a slot in `token`, a block in `paged`.

In use: a request that runs holds the node at which its cached prefix ends, and thereby all nodes above; `locks` counts
that on every node of the path, so a node whose count is 0 has no descendant in use.

Order of eviction.  Exactly the nodes with no lock are linked in a ring, oldest first, the root between its two ends.
A path is released from its end upwards, so a parent enters after all of its children; and it leaves when a child is
locked again.  Hence the first one is always a leaf, the one released longest ago: least recently used leaf first, in
O(1), without a heap.

Costs: a look-up is one dict probe and one comparison (`bytes.startswith`, a memcmp) per node on its path, plus a
bisection in the last one; locking is one step per node on the path.  Nothing grows with the number of nodes.
"""

from __future__ import annotations

from array import array

from kvslot.replay.policies.sequences import TOKEN_BYTES


class Node:
    """An edge of the tree with its end."""

    __slots__ = ("key", "kids", "locks", "newer", "offset", "older", "parent", "places")

    def __init__(self, key: bytes, places: array[int], parent: Node | None, offset: int = 0) -> None:
        self.key = key
        self.places = places
        self.offset = offset
        """Slot of the first token in the first block (`paged`; 0 in `token`)."""
        self.parent = parent
        self.kids: dict[bytes, Node] = {}
        """By first token (its four bytes)."""
        self.locks = 0
        self.older: Node = parent or self
        self.newer: Node = parent or self
        """Neighbours in the ring while `locks` is 0."""

    @property
    def tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES


class Match:
    """How far a prompt goes down the tree."""

    __slots__ = ("end", "inside", "path")

    def __init__(self, path: list[Node], inside: int, end: int) -> None:
        self.path = path
        """Nodes on the way, the root left out."""
        self.inside = inside
        """Bytes of the last node's key that matched, if not all of them; else 0."""
        self.end = end
        """Bytes of the prompt that matched."""


def common(tokens: bytes, start: int, key: bytes, limit: int) -> int:
    """Length in bytes (whole tokens) of the common prefix of tokens[start:] and key, at most `limit`.

    Both slices are compared as wholes first, then by bisection: slicing and comparing bytes is memcpy and memcmp."""
    if tokens[start : start + limit] == key[:limit]:
        return limit
    low, high = 0, limit // TOKEN_BYTES
    while high - low > 1:
        middle = (low + high) >> 1
        a, b = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if tokens[start + a : start + b] == key[a:b]:
            low = middle
        else:
            high = middle
    return low * TOKEN_BYTES


class Tree:
    """The nodes, their locks, their order of eviction and the sums over them."""

    __slots__ = ("idle_places", "idle_tokens", "root", "tokens")

    def __init__(self) -> None:
        self.root = Node(b"", array("i"), None)
        self.root.locks = 1  # so that no walk ever takes it for idle
        self.idle_tokens = 0
        self.idle_places = 0
        """Tokens and places of the nodes without a lock."""
        self.tokens = 0

    def match(self, tokens: bytes, node: Node | None = None, at: int = 0) -> Match:
        """Follow `tokens` down from byte `at`, where `node` ends (the root by default).  No side effects."""
        if node is None:
            node = self.root
        end = len(tokens)
        path: list[Node] = []
        while at < end:
            child = node.kids.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                break
            path.append(child)
            key = child.key
            if tokens.startswith(key, at):
                at += len(key)
                node = child
                continue
            inside = common(tokens, at, key, min(len(key), end - at))
            return Match(path, inside, at + inside)
        return Match(path, 0, at)

    def lock(self, path: list[Node]) -> None:
        """One more request uses these nodes (a path down from the root, or from a node that it has locked already)."""
        for node in path:
            if not node.locks:
                node.older.newer = node.newer
                node.newer.older = node.older
                self.idle_tokens -= len(node.key) // TOKEN_BYTES
                self.idle_places -= len(node.places)
            node.locks += 1

    def unlock(self, node: Node) -> None:
        """A request lets go of `node` and all above it."""
        root = self.root
        while node is not root:
            node.locks -= 1
            if not node.locks:
                last = root.older
                last.newer = root.older = node
                node.older = last
                node.newer = root
                self.idle_tokens += len(node.key) // TOKEN_BYTES
                self.idle_places += len(node.places)
            assert node.parent is not None
            node = node.parent

    def split(
        self, node: Node, at: int, upper_places: array[int], lower_places: array[int], lower_offset: int = 0
    ) -> Node:
        """Cut `node`'s key at byte `at` and lock the upper half for the caller, who holds what is above it; -> it.

        `node` stays the lower half with its kids, its locks and its place in the order (a cold lower half must not
        become recent because its upper half was used), so whoever holds it goes on doing so."""
        assert 0 < at < len(node.key)
        parent = node.parent
        assert parent is not None
        if not node.locks:
            self.idle_tokens -= at // TOKEN_BYTES
            self.idle_places += len(lower_places) - len(node.places)
        upper = Node(node.key[:at], upper_places, parent, node.offset)
        upper.locks = node.locks + 1
        parent.kids[node.key[:TOKEN_BYTES]] = upper
        node.key = node.key[at:]
        node.places = lower_places
        node.offset = lower_offset
        node.parent = upper
        upper.kids[node.key[:TOKEN_BYTES]] = node
        return upper

    def attach(self, parent: Node, key: bytes, places: array[int], offset: int = 0) -> Node:
        """A new leaf under `parent`, with one lock: the caller's, who holds `parent` as well."""
        node = Node(key, places, parent, offset)
        node.locks = 1
        parent.kids[key[:TOKEN_BYTES]] = node
        self.tokens += len(key) // TOKEN_BYTES
        return node

    def oldest(self, but: Node | None = None) -> Node | None:
        """The leaf released longest ago, `but` excepted; None: nothing can be evicted."""
        node = self.root.newer
        if node is but:
            node = node.newer
        return None if node is self.root else node

    def evict(self, but: Node | None = None) -> Node:
        """Take `oldest(but)` out; there must be one.  The caller gives its places back."""
        node = self.oldest(but)
        assert node is not None
        assert not node.kids
        parent = node.parent
        assert parent is not None
        del parent.kids[node.key[:TOKEN_BYTES]]
        node.older.newer = node.newer
        node.newer.older = node.older
        # Without these links nothing dead is kept alive, and no cycle waits for a garbage collector.
        node.parent = None
        node.older = node.newer = self.root
        tokens = len(node.key) // TOKEN_BYTES
        self.tokens -= tokens
        self.idle_tokens -= tokens
        self.idle_places -= len(node.places)
        return node

    def idle(self) -> list[Node]:
        """Nodes without a lock, next to be evicted first; for recounts."""
        found: list[Node] = []
        node = self.root.newer
        while node is not self.root:
            assert node.newer.older is node
            found.append(node)
            node = node.newer
        return found

    def nodes(self) -> list[Node]:
        """All nodes but the root, parents before children; for recounts and pictures."""
        found = [self.root]
        for node in found:
            found.extend(node.kids.values())
        return found[1:]
