"""Sessions whose kernels read whole pages: what they find of what they published themselves."""

from kvslot.allocator import Admitted, Pool, PoolConfig, Space, audit


def test_a_chat_in_pages_finds_its_own_turns() -> None:
    """The third turn of a chat finds all of the first two but the last page, as it does in full blocks."""
    pool = Pool(PoolConfig(blocks=64, block_size=16))
    root = pool.open_space(Space())
    session = pool.open_session(page=16)
    hits = []
    for turn, length in enumerate((120, 200, 280)):
        tokens = b"".join(token.to_bytes(4, "little") for token in range(length))
        answer = pool.allocate(session, root, tokens, now=float(turn))
        assert isinstance(answer, Admitted)
        hits.append(answer.hit)
        pool.commit(session, answer.sequence, length)
        pool.free(session, answer.sequence)
        assert audit(pool) == []
    assert hits[1] >= 120 // 16 * 16
    assert hits[2] >= 200 // 16 * 16


def test_prompts_that_part_inside_a_page_share_all_of_it() -> None:
    """Where nodes meet inside a page, that page is put together from copies and the hit goes on behind it."""
    pool = Pool(PoolConfig(blocks=64, block_size=16))
    root = pool.open_space(Space())
    session = pool.open_session(page=16)
    first = list(range(40))
    other = [*range(20), *range(100, 160)]

    def run(tokens: list[int]) -> Admitted:
        told = b"".join(token.to_bytes(4, "little") for token in tokens)
        answer = pool.allocate(session, root, told)
        assert isinstance(answer, Admitted)
        pool.commit(session, answer.sequence, len(tokens))
        assert audit(pool) == []
        pool.free(session, answer.sequence)
        return answer

    run(first)
    assert run(other).hit == 20
    again = run([*other, 7])
    assert again.hit == 80
    assert sum(copy.length for copy in again.copies) == 16
    assert {copy.target // 16 for copy in again.copies} == {again.extents[2] // 16}
    assert audit(pool) == []
