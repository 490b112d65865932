"""Naive twins of the baseline policies: the same rules on plain lists, found by scanning, with no care for speed.

A twin answers `admit` with the hit (or None for refused), `grow` with true or false, and `sums()` with the gauges that
it can tell.  Prefixes are compared as whole byte strings; nothing is hashed, linked or kept incrementally.
"""

from __future__ import annotations

from typing import Any

TOKEN = 4


def ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)


class ContiguousTwin:
    """A map of slots; best fit by looking at every hole."""

    def __init__(self, pool: int, block: int, watermark: float, longest: int) -> None:
        self.slots: list[int | None] = [None] * pool
        self.length = min(longest, pool)
        self.written: dict[int, int] = {}
        self.prompt: dict[int, int] = {}

    def admit(self, number: int, prompt: bytes) -> int | None:
        holes: list[tuple[int, int]] = []
        at = 0
        while at < len(self.slots):
            end = at
            while end < len(self.slots) and self.slots[end] is None:
                end += 1
            if end > at:
                holes.append((end - at, at))
            at = max(end, at + 1)
        fits = [hole for hole in sorted(holes) if hole[0] >= self.length]
        if not fits or len(prompt) // TOKEN > self.length:
            return None
        start = fits[0][1]
        self.slots[start : start + self.length] = [number] * self.length
        self.prompt[number] = len(prompt) // TOKEN
        self.written[number] = 0
        return 0

    def prefilled(self, number: int) -> None:
        self.written[number] = self.prompt[number]

    def grow(self, number: int, length: int) -> bool:
        if length > self.length:
            return False
        self.written[number] = length - 1
        return True

    def finish(self, number: int, output: bytes) -> None:
        self.abort(number)

    def abort(self, number: int) -> None:
        self.slots = [None if owner == number else owner for owner in self.slots]
        del self.written[number]

    def sums(self) -> dict[str, int]:
        private = sum(self.written.values())
        return {
            "free": self.slots.count(None),
            "private": private,
            "reserved": len(self.slots) - self.slots.count(None) - private,
            "cached": 0,
        }


class HashedTwin:
    """Blocks with the prefix they hold; the free ones in one list, in the order in which they will be handed out."""

    def __init__(self, pool: int, block: int, watermark: float, longest: int) -> None:
        self.size = block
        self.total = pool // block
        self.holds: list[bytes | None] = [None] * self.total
        self.since: list[int] = [0] * self.total
        self.free = list(range(self.total))
        self.watermark = int(watermark * self.total)
        self.live: dict[int, dict[str, Any]] = {}
        self.clock = 0

    def admit(self, number: int, prompt: bytes) -> int | None:
        length = len(prompt) // TOKEN
        hits: list[int] = []
        for end in range(self.size, length, self.size):
            holders = [b for b in range(self.total) if self.holds[b] == prompt[: end * TOKEN]]
            if not holders:
                break
            hits.append(min(holders, key=lambda b: self.since[b]))
        new = ceil(length, self.size) - len(hits)
        left = [block for block in self.free if block not in hits]
        if new + (self.watermark if self.live else 0) > len(left):
            return None
        self.free = left
        blocks = hits + [self.take() for _ in range(new)]
        self.live[number] = {
            "prompt": prompt,
            "blocks": blocks,
            "published": len(hits),
            "written": 0,
            "hit": len(hits) * self.size,
        }
        return len(hits) * self.size

    def take(self) -> int:
        block = self.free.pop(0)
        self.holds[block] = None
        return block

    def publish(self, number: int, tokens: bytes) -> None:
        of = self.live[number]
        of["written"] = len(tokens) // TOKEN
        for place in range(of["published"], of["written"] // self.size):
            block = of["blocks"][place]
            self.clock += 1
            self.holds[block] = tokens[: (place + 1) * self.size * TOKEN]
            self.since[block] = self.clock
            of["published"] = place + 1

    def prefilled(self, number: int) -> None:
        self.publish(number, self.live[number]["prompt"])

    def grow(self, number: int, length: int) -> bool:
        of = self.live[number]
        while length > len(of["blocks"]) * self.size:
            if not self.free:
                return False
            of["blocks"].append(self.take())
        of["written"] = length - 1
        return True

    def finish(self, number: int, output: bytes) -> None:
        self.publish(number, self.live[number]["prompt"] + output)
        self.abort(number)

    def abort(self, number: int) -> None:
        blocks = self.live.pop(number)["blocks"]
        for block in reversed(blocks):
            if not any(block in of["blocks"] for of in self.live.values()):
                if self.holds[block] is None:
                    self.free.insert(0, block)
                else:
                    self.free.append(block)

    def sums(self) -> dict[str, int]:
        held = [content for content in self.holds if content is not None]
        private = reserved = 0
        for of in self.live.values():
            written = max(0, of["written"] - of["published"] * self.size)
            private += written
            reserved += (len(of["blocks"]) - of["published"]) * self.size - written
        return {
            "free": sum(self.holds[block] is None for block in self.free) * self.size,
            "cached": len(set(held)) * self.size,
            "duplicates": (len(held) - len(set(held))) * self.size,
            "evictable": sum(self.holds[block] is not None for block in self.free) * self.size,
            "private": private,
            "reserved": reserved,
        }


class Piece:
    """A node: the tokens from `start` to the end of `text`, which is the whole prefix."""

    def __init__(self, start: int, text: bytes, offset: int) -> None:
        self.start = start
        self.text = text
        self.offset = offset
        self.stamp = 0

    @property
    def end(self) -> int:
        return len(self.text) // TOKEN


class RadixTwin:
    """Pieces in a list, blocks as counts.  A block size of 1 without blocks of its own per node is `token`."""

    def __init__(self, pool: int, block: int, watermark: float, longest: int, *, paged: bool) -> None:
        self.paged = paged
        self.size = block if paged else 1
        self.total = pool // self.size
        self.free = self.total
        self.watermark = int(watermark * self.total)
        self.pieces: list[Piece] = []
        self.live: dict[int, dict[str, Any]] = {}
        self.clock = 0

    # What can be read off the list.

    def places(self, piece: Piece) -> int:
        return ceil(piece.offset + piece.end - piece.start, self.size)

    def in_use(self, piece: Piece) -> bool:
        return any(of["text"].startswith(piece.text) for of in self.live.values())

    def readers(self, piece: Piece) -> int:
        return sum(of["text"].startswith(piece.text) for of in self.live.values())

    def continued(self, piece: Piece) -> bool:
        return any(each.start == piece.end and each.text.startswith(piece.text) for each in self.pieces)

    def idle(self) -> list[Piece]:
        return [piece for piece in self.pieces if not self.in_use(piece)]

    def follow(self, text: bytes, at: int = 0) -> tuple[list[Piece], int]:
        """-> pieces on the way from token `at` on, tokens matched of the last one if not all of it."""
        path: list[Piece] = []
        while True:
            nexts = [
                piece
                for piece in self.pieces
                if piece.start == at and piece.text[: (at + 1) * TOKEN] == text[: (at + 1) * TOKEN]
            ]
            if not nexts or at * TOKEN >= len(text):
                return path, 0
            (piece,) = nexts
            path.append(piece)
            same = at
            while same < piece.end and piece.text[: (same + 1) * TOKEN] == text[: (same + 1) * TOKEN]:
                if (same + 1) * TOKEN > len(text):
                    break
                same += 1
            if same < piece.end:
                return path, same - piece.start
            at = same

    # What changes it.

    def evict(self, but: Piece | None = None) -> bool:
        leaves = [piece for piece in self.idle() if not self.continued(piece) and piece is not but]
        if not leaves:
            return False
        piece = min(leaves, key=lambda each: each.stamp)
        self.pieces.remove(piece)
        self.free += self.places(piece)
        return True

    def take(self, count: int) -> None:
        while count > self.free:
            assert self.evict()
        self.free -= count

    def split(self, piece: Piece, tokens: int) -> bool:
        """Into two pieces, with a block more if the cut lies inside one.  False: there is none."""
        at = piece.start + tokens
        into = (piece.offset + tokens) % self.size
        if into:
            if not self.free and not self.evict(piece):
                return False
            self.free -= 1
        self.pieces.append(Piece(piece.start, piece.text[: at * TOKEN], piece.offset))
        piece.start = at
        piece.offset = into
        return True

    def admit(self, number: int, prompt: bytes) -> int | None:
        length = len(prompt) // TOKEN
        if length > self.total * self.size:
            return None
        path, part = self.follow(prompt)
        ways = [(path, part)]
        if part:
            into = (path[-1].offset + part) % self.size
            if into:
                ways.append((path, part - into) if part > into else (path[:-1], 0))
        if path and not self.live and self.paged:
            ways.append(([], 0))
        for path, part in ways:
            whole = path[:-1] if part else path
            held = (whole[-1].end if whole else 0) + part
            hit = min(held, length - 1)
            copy = bool(part and (path[-1].offset + part) % self.size)
            need = ceil(length - hit, self.size) + copy
            idle = self.idle()
            kept = sum(self.places(piece) for piece in path if piece in idle)
            if part and not copy and path[-1] in idle:
                kept -= self.places(path[-1]) - (path[-1].offset + part) // self.size
            there = self.free + sum(self.places(piece) for piece in idle) - kept
            if need + (self.watermark if self.live else 0) <= there:
                break
        else:
            return None
        # It holds what is above first, so that the split cannot evict it.
        self.live[number] = of = {
            "prompt": prompt,
            "text": whole[-1].text if whole else b"",
            "start": hit,
            "offset": 0,
            "blocks": 0,
            "borrowed": False,
            "written": 0,
            "copies": 0,
        }
        if part:
            assert self.split(path[-1], part)
        of["text"] = prompt[: held * TOKEN]
        count = ceil(length - hit, self.size)
        self.take(count)
        of["blocks"] = count
        return hit

    def publish(self, number: int, tokens: bytes) -> None:
        of = self.live[number]
        of["copies"] = 0
        end = len(tokens) // TOKEN
        held = len(of["text"]) // TOKEN
        if end == held and of["start"] == end:
            return
        path, part = self.follow(tokens, held)
        mine = [piece for piece in self.pieces if piece.text == of["text"]]
        if not path and of["borrowed"] and not self.continued(mine[0]) and self.readers(mine[0]) == 1:
            mine[0].text = tokens
            of["text"] = tokens
            self.advance(of, end)
            return
        whole = path[:-1] if part else path
        if whole:
            of["text"] = whole[-1].text
        found = len(of["text"]) // TOKEN
        matched = found + part
        closed = False
        if part:
            wanted = matched < end or not self.paged
            if wanted and self.split(path[-1], part):
                of["text"] = tokens[: matched * TOKEN]
                found = matched
            else:
                closed = True
                of["copies"] = matched - found
        if found > of["start"]:
            self.drop(of, found)
        if closed or found == end:
            return
        if of["borrowed"]:
            if not self.free and not self.evict():
                return
            self.free -= 1
            of["borrowed"] = False
        self.pieces.append(Piece(found, tokens, of["offset"]))
        of["text"] = tokens
        self.advance(of, end)

    def drop(self, of: dict[str, Any], found: int) -> None:
        whole, offset = divmod(of["offset"] + found - of["start"], self.size)
        if whole:
            self.free += whole - of["borrowed"]
            of["blocks"] -= whole
            of["borrowed"] = False
        of["offset"], of["start"] = offset, found

    def advance(self, of: dict[str, Any], end: int) -> None:
        whole, offset = divmod(of["offset"] + end - of["start"], self.size)
        of["blocks"] -= whole
        of["offset"], of["start"] = offset, end
        of["borrowed"] = offset > 0

    def prefilled(self, number: int) -> None:
        of = self.live[number]
        of["written"] = len(of["prompt"]) // TOKEN
        self.publish(number, of["prompt"])

    def grow(self, number: int, length: int) -> bool:
        of = self.live[number]
        capacity = of["start"] - of["offset"] + of["blocks"] * self.size
        if length > capacity:
            least = ceil(length - capacity, self.size)
            there = self.free + sum(self.places(piece) for piece in self.idle())
            if least > there:
                return False
            count = least if self.paged else min(max(least, 16), there)
            self.take(count)
            of["blocks"] += count
        of["written"] = length - 1
        return True

    def finish(self, number: int, output: bytes) -> None:
        of = self.live[number]
        tokens = of["prompt"] + output
        of["written"] = len(tokens) // TOKEN
        if len(tokens) > len(of["text"]):
            self.publish(number, tokens)
        self.abort(number)

    def abort(self, number: int) -> None:
        of = self.live.pop(number)
        self.free += of["blocks"] - of["borrowed"]
        released = [piece for piece in self.idle() if of["text"].startswith(piece.text)]
        for piece in sorted(released, key=lambda each: -each.end):
            self.clock += 1
            piece.stamp = self.clock

    def sums(self) -> dict[str, int]:
        private = reserved = copies = 0
        for of in self.live.values():
            written = max(0, of["written"] - of["start"])
            private += written - of["copies"]
            copies += of["copies"]
            reserved += of["blocks"] * self.size - of["offset"] - written
        return {
            "free": self.free * self.size,
            "cached": sum(piece.end - piece.start for piece in self.pieces),
            "evictable": sum(piece.end - piece.start for piece in self.idle()),
            "private": private,
            "reserved": reserved,
            "duplicates": copies,
        }
