"""Faults planted on purpose, each of which the histories, the judge or an example must catch.

A canary changes one line of the core, found by its text, and then runs what ought to notice.  One that is not caught
means that a rule is no longer watched; one whose text is gone wants a new line to break for the same rule.
"""

# ruff: noqa: E501  the faults are a table, one a line
from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvslot.allocator import Pool
from kvslot.allocator.admission import Admission
from kvslot.allocator.moves import Moves
from kvslot.allocator.runs import FreeRuns
from kvslot.allocator.sessions import Session
from kvslot.allocator.slots import Ledger
from kvslot.allocator.tree import PrefixTree

from ..core import test_accounts, test_admission, test_eviction, test_moves, test_sequences, test_sessions
from .histories import KINDS

SEEDS = 400


@dataclass(frozen=True)
class Canary:
    rule: str  # what is broken, and by its number in the design where it stands
    owner: Any
    method: str
    old: str
    new: str
    by: str | Callable[[], None] = "chaos"


C = Canary
CANARIES = [
    # -- 3.1 to 3.3: states, free space, tree
    C("3.1 padding is never handed out", Pool, "__init__", "config.block_size, self.padding,", "config.block_size, self.padding - 1,"),
    C("3.1 one place changes state", Ledger, "shift_all", "if self.journal is not None:", "if self.journal is not None and target != 3:"),
    C("3.1 handles are not used again", Pool, "_start", "self.serial = handle = self.serial + 1", "handle = self.serial + 1"),
    C("3.3 keys are compared in full", PrefixTree, "match", "if not startswith(key, at):", "if not startswith(key[:unit], at) or at + len(key) > len(tokens):"),
    C("3.3 split keeps holds", PrefixTree, "split", "self.holds[upper] = 1 if self.holds[node] else 0", "self.holds[upper] = 0"),
    C("3.3 split keeps places", PrefixTree, "split", "self.set_extents(upper, front)", "self.set_extents(upper, back[:1] + front[1:])"),
    C("3.3 split keeps depths", PrefixTree, "split", "self.depth[node] += at", "self.depth[node] += at - 1"),
    C("3.3 a token is left to compute", Pool, "allocate", "hit = self._last_left(n)", "hit = n - n % self.unit"),
    C("3.3 evictable is what nobody holds", PrefixTree, "unhold", "self.evictable +=", "self.evictable += 1 +"),
    # -- 3.4: life of a sequence
    C("3.4 allocate holds what it found", Pool, "allocate", "tree.hold(node)\n    need", "need"),
    C("3.4 a refusal leaves no hold", Pool, "allocate", "if later is not None:\n            tree.unhold(node, tree.tick[node])", "if later is not None:\n            pass"),
    C("3.4 publish only what is written", Pool, "commit", "return self._publish(sequence, length, expiry)", "return self._publish(sequence, known - known % self.unit, expiry)"),
    C("3.4 publish what the tree lacks", Pool, "_publish", "self._gather(sequence, position, length, shared)", "self._gather(sequence, max(0, position - self.unit), length, shared)"),
    C("3.4 duplicates are counted", Pool, "_mark_duplicates", "self.duplicates += marked", "pass"),
    C("3.4 duplicates are freed once", Pool, "_let_go", "if piece.kind == DUPLICATE:", "if piece.kind == DUPLICATE:\n            self._release(piece.extents, piece.length, PRIVATE)"),
    C("3.4 a shared range is not written in place", Pool, "_roll_back", "piece.holders is None and not piece.fence", "True"),
    C("3.4 a shared range is counted", Pool, "fork", "piece.refs += 1", "pass"),
    C("3.4 a shared range goes with its last holder", Pool, "_let_go", "if piece.refs:", "if piece.refs > 1:"),
    C("3.4 a shared range waits for every holder's fence", Pool, "_let_go", "if piece.fence < fence:", "if False:", test_sequences.test_shared_slots_wait_for_the_latest_fence_of_all),
    C("3.4 a published fork's fence becomes a lease", Pool, "_follow", "if piece.fence > session.passed():", "if False:", test_sequences.test_fence_of_a_fork_outlives_publication),
    C("3.4 copy sources are kept", Pool, "_peel", "sequence.sources = [*(sequence.sources or ()), piece]", "pass"),
    C("3.4 copies name the right tokens", Pool, "_peel", "source = end - count", "source = end - count - 1"),
    C("3.4 a page's hit is whole and in place", Pool, "_allocate_pages", "if (extents[i] - position) % page:", "if False:"),
    C("3.4 pages are put together where nodes meet inside one", Pool, "_allocate_pages", "if first != position and joints[-1:] != [first]:", "if False:"),
    C("3.4 a partial page is copied", Pool, "_list_copies", "position = answer.hit - part", "position = answer.hit - part - 1"),
    C("3.4 roll-back forgets what was told", Pool, "_roll_back", "sequence.tokens = sequence.tokens[: 4 * max(keep_to - sequence.tokens_from, 0)]", "pass"),
    C("3.4 roll-back detaches below the published end", Pool, "_roll_back", "if keep_to < sequence.base:", "if False:"),
    C("3.4 only windowed layouts drop the front", Pool, "trim", "if keep_from and not self.config.windowed:", "if False:"),
    C("3.4 a window's front goes behind the fence", Pool, "_drop_front", "self._let_go(sequence, dropped, 0, fence)", "self._let_go(sequence, dropped, 0, 0)"),
    # -- 3.5: admission, eviction, preemption
    C("3.5 fenced memory is not free", Admission, "_admit", "free, evictable = pool.runs.total, pool.yields", "free, evictable = pool.runs.total + pool.ledger.counts[3], pool.yields"),
    C("3.5 the watermark holds back new requests", Admission, "_admit", "watermark = self._for_growth()", "watermark = 0"),
    C("3.5 the watermark is waived while nothing runs", Admission, "_for_growth", "if not pool.sequences:", "if False:", test_admission.test_watermark_holds_back_new_requests_only),
    C("3.5 NEVER for what cannot fit", Pool, "allocate", "if n > session.quota or n > account.slots or n > self.usable:", "if n > 2 * self.usable:"),
    C("3.5 NEVER names the caller's limit", Pool, "allocate", "*narrowest(session, account, self.usable)", "self.usable"),
    C("3.5 not NEVER while memory comes back", Admission, "starve", "self._occupied(sequence) + need > limit", "True"),
    C("3.5 not NEVER by an old count of pages", Admission, "_hopeless", "whole_pages(self.pool, page) * page >= need", "False", test_admission.test_growth_in_whole_pages_is_given_up_only_after_a_count),
    C("3.5 quotas bind", Admission, "_admit", "if session.charged + need + self._growth_of(session) > session.quota:", "if False:"),
    C("3.5 quotas bind growth", Admission, "grow", "if session.charged + need > session.quota:", "if False:"),
    C("3.5 a tenant's quota binds", Admission, "_admit", "if account.charged + need + self._growth_under(account) > account.slots:", "if False:"),
    C("3.5 a tenant's quota binds growth", Admission, "grow", "if account.charged + need > account.slots:", "if False:"),
    C("3.5 a tenant's runs in reserve are bounded", Admission, "grow", "if account.unwritten + need > account.room:", "if False:", test_accounts.test_growth_waits_for_runs_in_reserve),
    C("3.5 growth of a tenant comes before its new requests", Admission, "_admit", "need + self._growth_under(account)", "need", test_accounts.test_a_tenants_growth_comes_before_its_new_requests),
    C("3.5 growth that waits for runs comes before new requests", Admission, "runs_wanted", "needs > 0 and", "False and", test_accounts.test_new_requests_take_no_runs_from_growth_that_waits_in_pages),
    C("3.5 a tenant is charged until its slots are free", Pool, "_unfence", "account.charged -= piece.length", "pass"),
    C("3.5 who waits for a quota holds nobody back", Admission, "pump", "if not _within_quota(ticket):", "if False:", test_accounts.test_who_waits_for_a_tenants_quota_holds_nobody_back),
    C("3.5 what is leased is not evicted", PrefixTree, "hold", "if not self.kid[node]:", "if False:"),
    C("3.5 what is pinned is not evicted", Pool, "pin", "tree.hold(node)", "pass"),
    C("3.5 no more is evicted than needed", Pool, "_evict_cells", "and runs.total < most and rounds:", "and tree.evictable and rounds:", test_eviction.test_scattered_leaves_are_not_all_given_up_for_a_cell),
    C("3.5 of a large leaf only the tail goes", Pool, "_drop", "if most < length:", "if most < 0:", test_eviction.test_of_a_large_leaf_only_the_tail_goes),
    C("3.5 nothing is evicted for a refusal", Pool, "_take_pages", "if self.admission.lack_pages(need, page, now):", "if False:"),
    C("3.5 the oldest is never a victim", Admission, "_escalate", "if sequence is spared or sequence.handle in self.named", "if sequence is not scope[0] or sequence.handle in self.named", "load"),
    C("3.5 victims are named one by one", Admission, "_escalate", "victim.session.owes[victim.handle] = deadline", "pass", test_admission.test_debtor_gets_preempt_first_until_it_answers),
    C("3.5 pressure comes first", Admission, "_escalate", "if now < self.patient:", "if False:", test_admission.test_pressure_comes_first_and_is_given_time),
    C("3.5 debtors get no new work", Admission, "_admit", "if self._overdue(session, now):", "if False:", test_admission.test_debtor_gets_preempt_first_until_it_answers),
    C("3.5 growth before new requests", Admission, "_for_growth", "self._growth_held(NO_HANDLE)", "0"),
    C("3.5 the oldest ticket's need is held back", Admission, "_held", "if oldest is not None and oldest is not mine:", "if False:"),
    C("3.5 a ticket keeps its age", Admission, "refuse", "mine = self._mine(session, ticket) if sequence is None", "mine = None if sequence is None"),
    C("3.5 a ticket ends after its grace", Admission, "pump", "0 <= t.ready < now - grace", "False"),
    C("3.5 tickets end with their session", Admission, "forget_session", "if t.session is session", "if False", test_sessions.test_growth_of_a_lost_session_holds_nobody_back),
    C("3.5 a window's slots are reserved", Admission, "_clear", "window.hold(start, length)", "pass"),
    C("3.5 a window gives way to growth", Admission, "grow", "self.drop_window()", "pass", test_admission.test_window_gives_way_to_growth),
    C("3.5 fences of the stalled are not awaited", Admission, "coming_free", "if s.stalled or s.life", "if s.life", test_admission.test_stalled_fences_hold_nothing_back),
    # -- slots that are wiped before they are free
    C("what was in use is wiped", Pool, "_release", "if self.scrubs and state != FREE and not wiped:", "if self.scrubs and state != FREE and state != CACHED and not wiped:"),
    C("what is being wiped is not free", Pool, "wipe", "self.wiping[handle] = (taken, most - left)", "self.wiping[handle] = (taken, most - left)\n    self._release(list(taken), most - left, FENCED, wiped=True)"),
    C("what is evicted and not wiped is not handed out", Admission, "_admit", "free, evictable = pool.runs.total, pool.yields", "free, evictable = pool.runs.total, pool.tree.evictable"),
    # -- what is sorted out for long requests
    C("3.2 what is in stock is taken once", FreeRuns, "_from_stock", "del stock[i:]", "pass"),
    C("3.2 a piece cut in stock keeps its rest", FreeRuns, "_from_stock", "stock[i + 1] = -left", "stock[i + 1] += left"),
    C("3.2 what stands in stock is free", FreeRuns, "gather", "self.total += found * cell", "pass"),
    C("3.2 ragged ends are given back", FreeRuns, "put_aside", "if start > slot:", "if False:"),
    C("3.2 the stock is counted when it is filed", FreeRuns, "unstock", "self.stocked -= length // cell", "pass"),
    # -- 4.4: leases end by steps
    C("4.4 slots wait for their fence", Pool, "_let_go", "if last <= passed:", "if True:"),
    C("4.4 leases wait for their fence", Pool, "_let_go", "if fence <= passed:", "if fence <= passed or node:"),
    C("4.4 a fence has passed when its step has completed", Pool, "_pass_fences", "fences[0][0] <= passed", "fences[0][0] <= passed + 1"),
    C("4.4 a group's fence waits for all its processes", Session, "passed", "if self.group is None:", "if True:"),
    C("4.4 a fence beyond the submitted is refused", Pool, "free", "if not 0 <= fence <= session.submitted:", "if False:"),
    C("4.4 steps complete after they are submitted", Pool, "progress", "completed > submitted or ", ""),
    C("4.4 steps only rise", Pool, "progress", "or completed < session.completed", "", test_sessions.test_progress_only_rises),
    C("4.4 a lost session's slots stay", Pool, "lose", "session.life = Life.LOST", "session.life = Life.GONE"),
    C("4.4 a lost session's fences stay", Pool, "_pass_fences", "if session.life:", "if False:"),
    C("4.4 who returns has everything again", Pool, "resume", "self._bring_back(session, [piece for piece, _ in session.swept.values()])", "pass"),
    C("4.4 not gone while a process of its group lives", Pool, "_all_gone", "if all(member.proven for member in members):", "if True:", test_sessions.test_gone_only_after_lost_and_with_the_group),
    C("4.4 Bye only when all steps have completed", Pool, "bye", "if session.passed() < session.submitted:", "if False:", test_sessions.test_bye_waits_for_all_steps_of_the_group),
    C("4.4 nothing is moved from under a reader", Moves, "finish", "elif tree.holds[node] and (readers := self.readers(node)) is None:", "elif False:", test_moves.test_nothing_is_moved_from_under_a_reader),
    C("4.4 every holder is known", Moves, "readers", "if left or ", "if ", test_moves.test_nothing_is_moved_from_under_a_reader),
    C("4.4 only who follows is told", Moves, "follows", "session.movable", "True"),
    C("4.4 who was not told of moves keeps its slots", Moves, "_publish", "if not readers:", "if True:", test_moves.test_old_slots_wait_for_the_step_that_applies_the_move),
    C("4.4 old slots wait for the epoch", Moves, "applied", "moved[0][0] <= epoch", "moved[0][0] <= epoch + 1", test_moves.test_old_slots_wait_for_the_step_that_applies_the_move),
    C("4.4 old slots wait for the steps before", Moves, "applied", "session.submitted, retired", "0, retired", test_moves.test_old_slots_wait_for_the_step_that_applies_the_move),
    C("4.4 old slots wait for all readers", Moves, "_publish", "Retired(self._retirements, move.source, move.length, len(told))", "Retired(self._retirements, move.source, move.length, 1)", test_moves.test_old_slots_wait_for_every_session),
    C("4.4 who returns is told again", Moves, "retell", "self.pool.pushes += pushes", "pass", test_moves.test_who_returns_is_told_again),
    C("4.4 who ends waits no longer", Moves, "ended", "self._let_go(session, entry[1])", "pass", test_moves.test_the_dead_do_not_keep_old_slots),
    C("4.4 a node of another life is not published", Moves, "_is_as_it_was", "not tree.parent[node] or not tree.flags[node] & MOVING_FLAG", "False", test_moves.test_a_number_that_is_used_again_is_another_node),
    C("4.4 only what stands where it stood", Moves, "_is_as_it_was", "cut(tree.extents(node), move.at, move.length) == move.source", "True", test_moves.test_what_stands_elsewhere_by_now_is_not_published),
    C("4.4 a split part is other tokens", Moves, "_is_as_it_was", " or tree.depth[node] != move.depth", "", test_moves.test_other_tokens_in_the_same_slots_are_not_what_was_copied),
    C("4.4 old places are bounded in all", Moves, "follows", "and self.retired_tokens <= (most := max(pool.usable // RETIRED_SHARE, RETIRED_LEAST))", "and 0 <= (most := max(pool.usable // RETIRED_SHARE, RETIRED_LEAST))", test_moves.test_old_slots_are_bounded_in_all),
    C("4.4 one session holds up a part of them", Moves, "follows", "and session.retired_tokens <= most // RETIRED_EACH", "", test_moves.test_a_session_that_never_applies_stops_its_own_moves_only),
    C("4.4 old slots wait for all processes", Pool, "_pass_fences", "self.moves.settle(session, passed)", "self.moves.settle(session, session.completed)", test_moves.test_a_worker_that_joins_keeps_old_slots),
    C("4.4 own copies are not moved", Moves, "_read_from_tree", "start = max(start, piece.position + piece.length)", "pass", test_moves.test_a_readers_own_copies_are_left_out),
    C("4.4 what nobody can follow any longer is not sent on", Moves, "follows", "and not session.life", ""),
    C("4.4 a target is at the edge of a free run", FreeRuns, "take_edges", "run + length_at[run] < slot + n", "False", test_moves.test_a_target_that_is_not_free_is_refused),
    C("4.4 a failed copy is not published", Moves, "finish", "elif not copied:", "elif False:"),
    C("4.4 a target is set aside until its copy has ended", Moves, "abandon", "move.node = 0", "move.node = 0\n    self.finish(move.handle)"),
    C("4.4 only the dead are swept", Pool, "_quarantine", "self._sweeping.remove(session)", "pass"),
]  # fmt: skip


def layer_of(owner: type, method: str) -> type:
    """The class among an owner's bases that has the method."""
    return next((base for base in owner.__mro__ if method in vars(base)), owner)


def source_of(owner: type, method: str) -> str:
    """The method's text as it stands in its file, without the class's indent."""
    path = inspect.getfile(owner)
    text = Path(path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == method:
                    lines = text.splitlines()[each.lineno - 1 : each.end_lineno]
                    return textwrap.dedent("\n".join(lines)) + "\n"
    raise AssertionError(f"no {owner.__name__}.{method} any more")


def plant(monkeypatch: pytest.MonkeyPatch, canary: Canary) -> None:
    """Changes the one line, in a copy of the method that takes its place."""
    owner = layer_of(canary.owner, canary.method)
    source = source_of(owner, canary.method)
    assert canary.old in source, f"{owner.__name__}.{canary.method} has no {canary.old!r} any more"
    broken = "from __future__ import annotations\n" + source.replace(canary.old, canary.new, 1)
    space: dict[str, Any] = {}
    module = sys.modules[owner.__module__]
    exec(compile(broken, f"<canary: {canary.rule}>", "exec"), vars(module), space)
    monkeypatch.setattr(owner, canary.method, space[canary.method])


def caught(canary: Canary) -> str:
    """What noticed: the first failing history, or the example; empty when nothing did."""
    if callable(canary.by):
        try:
            canary.by()
        except (Exception, pytest.fail.Exception) as fault:  # noqa: BLE001
            return repr(fault)
        return ""
    for seed in range(SEEDS):
        try:
            KINDS[canary.by](seed)
        except Exception as fault:  # noqa: BLE001
            return f"seed {seed}: {fault!r}"
    return ""


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.rule)
def test_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, canary: Canary) -> None:
    """A broken rule is noticed within a few hundred histories, or by its example."""
    plant(monkeypatch, canary)
    assert caught(canary), f"nothing noticed that this is broken: {canary.rule}"
