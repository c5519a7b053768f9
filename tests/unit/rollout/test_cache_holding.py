"""A full cache: which conversations fit, and how the turns of the others wait."""

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

import verl_multiturn.rollout.cache.holding as module
from verl_multiturn.rollout.cache.holding import Holding
from verl_multiturn.rollout.cache.need import CacheNeed, CacheReport
from verl_multiturn.rollout.life import Life, live


def of(began: float, group: str = "") -> Life:
    return Life("r", group or f"{began}", began=began)


def own(life: Life, tokens: int) -> list[int]:
    """Return a prompt that begins as no other conversation's."""
    return [round(life.began)] * tokens


def test_the_oldest_conversations_that_fit_are_let_in() -> None:
    need = CacheNeed(1000)
    assert need.tell("a", [(1.0, 300), (4.0, 250)], 0.9) == CacheReport(0.55, math.inf, 350)
    assert need.tell("b", [(2.0, 300), (3.0, 250)], 0.9) == CacheReport(
        1.1, 3.0, 25
    )  # that of 4.0 waits in the other worker
    assert need.tell("a", [(1.0, 950), (4.0, 300)], 0.9).youngest == 1.0
    assert need.tell("a", [(1.0, 2000)], 0.9).youngest == 1.0  # the oldest is let in whatever it needs
    assert need.tell("a", [], 0.9) == CacheReport(0.55, math.inf, 350)


def test_a_client_that_has_died_does_not_count() -> None:
    now = [0.0]
    need = CacheNeed(1000, lambda: now[0])
    need.tell("dead", [(1.0, 2000)], 0.9)
    now[0] = 31.0
    assert need.tell("a", [(2.0, 500)], 0.9) == CacheReport(0.5, math.inf, 400)


async def test_a_prompt_that_siblings_share_counts_once() -> None:
    holding = Holding(Server().ask)
    first, second, other = of(1.0, "g"), of(2.0, "g"), of(3.0, "h")
    for life, ids in ((first, [1, 2, 3]), (second, [1, 2, 3]), (other, [4, 5, 6])):
        holding.note(life, "r", ids)
    holding.note(first, "r", [1, 2, 3], 10)
    holding.note(second, "r", [1, 2, 3], 5)
    assert holding.told() == [(1.0, 13), (2.0, 5), (3.0, 3)]
    holding.leave(first)
    assert holding.told() == [(2.0, 8), (3.0, 3)]
    holding.note(other, "s", [7, 8])
    holding.drop(other, "r")
    assert holding.told() == [(2.0, 8), (3.0, 2)]
    holding.drop(other, "s")  # its last request goes on elsewhere
    assert holding.told() == [(2.0, 8)]
    second.leave()
    assert (holding.told(), len(holding._blocks), holding._stays) == ([], 0, {})


async def test_a_block_counts_once_whoever_shares_it() -> None:
    """Groups behind one system text, a subagent behind it too, and a history that is made shorter."""
    system = list(range(160))
    holding, lives = Holding(Server().ask), [of(1.0, "g"), of(2.0, "h"), of(3.0, "h")]
    for life in lives:
        holding.note(life, "r", [*system, *[ord(life.group)] * 20])
    assert holding.told() == [(1.0, 180), (2.0, 20), (3.0, 0)]
    holding.note(lives[0], "subagent", [*system, *[9] * 30])
    assert holding.told() == [(1.0, 210), (2.0, 20), (3.0, 0)]
    holding.drop(lives[0], "subagent")
    holding.leave(lives[0])
    assert holding.told() == [(2.0, 180), (3.0, 0)]
    holding.note(lives[2], "r", system[:150])
    assert holding.told() == [(2.0, 180), (3.0, 6)]  # the last six tokens are not a whole block


async def test_between_two_answers_what_is_shared_takes_room_once() -> None:
    holding, system = Holding(Server().ask), list(range(160))
    holding._room = 500
    lives = [of(1.0), of(2.0), of(3.0)]
    for life in lives:
        holding.note(life, "r", [*system, *own(life, 16)])
    assert holding._room == 500 - 160 - 3 * 16
    lives[0].leave()  # the others have the system text, too
    assert holding._room == 500 - 160 - 2 * 16
    lives[1].leave()
    lives[2].leave()
    assert (holding._room, len(holding._blocks)) == (500, 0)


async def test_many_groups_behind_one_system_text_wait_for_nothing_where_they_fit() -> None:
    """Fifteen groups of two, behind 600 tokens, in a cache of 1,000: counted once a group, one would fit."""
    server, system = Server(), list(range(600))
    holding, lives = Holding(server.ask), [of(float(began), f"{began // 2}") for began in range(30)]

    async def converse(life: Life) -> None:
        for _ in range(3):
            holding.note(life, "r", [*system, *[int(life.group)] * 10])
            await holding.let_in(life)
            holding.rest(life, "r")

    conversations = [asyncio.ensure_future(converse(life)) for life in lives]
    await settle()
    assert [each.done() for each in conversations] == [True] * 30
    assert (server.asked, holding.use) == (1, 0.862)  # 592 in blocks that all have, and 18 of each group


async def test_a_conversation_without_a_turn_counts_for_ten_seconds() -> None:
    now = [0.0]
    holding, away, young = Holding(Server().ask, lambda: now[0]), of(1.0, "g"), of(2.0, "g")
    for life in (away, young):
        holding.note(life, "r", list(range(800)))
    now[0] = 60.0
    assert holding.told() == [(1.0, 800), (2.0, 0)]  # a turn may take long
    holding.rest(away, "r")
    now[0] = 70.0
    assert holding.told() == [(1.0, 800), (2.0, 0)]
    now[0] = 70.1
    assert holding.told() == [(2.0, 800)]
    holding.note(away, "r", list(range(810)))  # it comes back
    assert holding.told() == [(1.0, 820), (2.0, 10)]  # it has grown by 10, and may again


async def test_of_an_agents_requests_without_a_turn_the_longest_counts() -> None:
    holding, agent = Holding(Server().ask), of(1.0)
    for request, tokens in (("main", 300), ("title", 20), ("first", 100), ("second", 150)):
        holding.note(agent, request, [tokens] * tokens)
    assert holding.told() == [(1.0, 570)]
    for request in ("main", "title", "first"):
        holding.rest(agent, request)
    assert holding.told() == [(1.0, 450)]


async def test_a_conversation_that_is_over_is_not_counted_again() -> None:
    holding = Holding(Server().ask)
    with live(Life("r", "g")) as life:
        holding.note(life, "r", [1, 2, 3])
        life.leave()
        assert (holding.told(), life.at_last) == ([], [])
        holding.note(life, "r", [1, 2, 3])
    assert (holding.told(), life.at_last) == ([], [])


async def test_nothing_waits_for_one_that_waits_for_others() -> None:
    """An old conversation has ended, and its row waits for a sibling, which waits for room."""
    holding, old, young = Holding(Server().ask), of(1.0, "g"), of(2.0, "g")
    holding.note(old, "r", own(old, 950))
    await holding.let_in(old)
    await settle()
    holding.note(young, "r", own(young, 300))
    waiting = asyncio.ensure_future(holding.let_in(young))
    await settle()
    assert not waiting.done()
    old.leave()
    await asyncio.wait_for(waiting, 60)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class Server:
    """A server whose cache has 1,000 tokens."""

    def __init__(self) -> None:
        self.need = CacheNeed(1000)
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self, conversations: Sequence[tuple[float, int]]) -> CacheReport:
        self.asked += 1
        told = self.need.tell("client", conversations, 0.9)
        await self.answers.wait()
        return told


async def test_nothing_waits_where_the_cache_suffices() -> None:
    server = Server()
    holding = Holding(server.ask)
    for began in range(8):
        life = of(float(began))
        holding.note(life, "r", own(life, 100))
        await holding.let_in(life)
        assert life.held_s == 0
    assert server.asked == 1
    holding = Holding(server.ask)
    lives = [of(float(began)) for began in range(8)]
    for life in lives:
        holding.note(life, "r", own(life, 100))
    await asyncio.gather(*map(holding.let_in, lives))
    assert (server.asked, holding.use) == (2, 0.8)  # one question for all that came at once


async def test_the_younger_wait_and_all_are_let_in_in_the_end() -> None:
    """Twelve conversations of 300 tokens, of three turns each, in a cache for three."""
    server, order = Server(), []
    holding = Holding(server.ask)

    async def converse(began: int) -> None:
        life = of(float(began))
        for turn in range(3):
            holding.note(life, "r", own(life, 100 * (turn + 1)))
            await holding.let_in(life)
            await asyncio.sleep(0.01)
        holding.leave(life)
        order.append(began)

    await asyncio.gather(*map(converse, reversed(range(12))))
    assert sorted(order) == list(range(12))
    assert order[-1] == 11  # the youngest is the last one


@pytest.mark.parametrize("seed", range(4))
async def test_all_are_let_in_in_the_end_whatever_they_grow_by(seed: int) -> None:
    """Groups of siblings that share a prompt, of random turns, one in five of which is cancelled, in a small cache."""
    rng, server, ended = random.Random(seed), Server(), []
    holding = Holding(server.ask)

    async def converse(number: int) -> None:
        ids = [number // 4] * rng.randrange(50, 400)
        with live(Life("r", f"{number // 4}")) as life:
            for _ in range(rng.randrange(1, 6)):
                holding.note(life, "r", ids)
                await holding.let_in(life)
                ids = ids + [number] * rng.randrange(1, 120)
                holding.note(life, "r", ids[:-1], 1)
                await asyncio.sleep(0)
                holding.rest(life, "r")
        ended.append(number)

    tasks = [asyncio.ensure_future(converse(number)) for number in range(24)]
    await settle()
    for task in rng.sample(tasks, 5):
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert len(ended) >= 19
    assert (holding._stays, len(holding._blocks), holding._held) == ({}, 0, {})


async def test_what_a_conversation_leaves_goes_to_the_next_ones_at_once() -> None:
    server = Server()
    holding, old = Holding(server.ask), of(1.0)
    young = [of(2.0), of(3.0), of(4.0)]
    for life in (old, *young):
        holding.note(life, "r", own(life, 700 if life is old else 310))
    await holding.let_in(old)
    await settle()
    waiting = [asyncio.ensure_future(holding.let_in(life)) for life in young]
    await settle()
    assert (server.asked, [each.done() for each in waiting]) == (1, [False, False, False])
    holding.leave(old)
    await settle()
    assert (server.asked, [each.done() for each in waiting]) == (1, [True, True, False])
    holding.leave(young[0])
    await asyncio.wait_for(waiting[2], 60)


async def test_between_two_answers_the_room_that_was_given_is_kept_to() -> None:
    server, others = Server(), CacheNeed(1000)
    holding, lives = Holding(server.ask), [of(1.0), of(2.0), of(3.0)]
    for life in lives:
        holding.note(life, "r", own(life, 100))
        await holding.let_in(life)
    for life in lives[:2]:  # they come back with 160 tokens more, and may add as many again: 420 each
        holding.rest(life, "r")
        holding.note(life, "r", own(life, 260))
    third = asyncio.ensure_future(holding.let_in(lives[2]))
    fourth = of(4.0)
    holding.note(fourth, "r", [1])
    waiting = asyncio.ensure_future(holding.let_in(fourth))
    for life in lives[:2]:
        await holding.let_in(life)
    await settle()
    assert (server.asked, third.done(), waiting.done()) == (1, False, False)
    lives[0].leave()
    await settle()
    assert (server.asked, third.done()) == (1, False)  # for one that waits there has to be room for some turns
    lives[1].leave()
    await settle()
    assert (server.asked, third.done()) == (1, True)
    lives[2].leave()
    await settle()
    assert (server.asked, waiting.done()) == (1, True)
    assert others.tell("a", [(1.0, 100)], 0.9).room == 800
    assert others.tell("b", [], 0.9).room == 800
    assert others.tell("b", [(2.0, 100)], 0.9).room == 350  # for each of the two clients


async def test_what_is_left_while_the_server_is_asked_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0)
    server = Server()
    holding, old, second = Holding(server.ask), of(1.0), of(2.0)
    young = [of(3.0 + number) for number in range(6)]
    for life in (old, second, *young):
        for tokens in (280, 300):
            holding.note(life, "r", own(life, tokens))
    await asyncio.gather(*map(holding.let_in, (old, second)))
    waiting = [asyncio.ensure_future(holding.let_in(life)) for life in young]
    await settle()
    assert holding._youngest == 2.0
    server.answers.clear()
    await settle()  # its request is pending
    second.leave()
    await settle()
    assert [each.done() for each in waiting] == [True, False, False, False, False, False]  # 640 tokens of 900
    old.leave()
    await settle()
    assert [each.done() for each in waiting] == [True, True, False, False, False, False]
    for task in waiting:
        task.cancel()


async def test_one_that_comes_back_after_long_takes_room_as_a_new_one() -> None:
    now, server = [0.0], Server()
    holding, lives = Holding(server.ask, lambda: now[0]), [of(1.0), of(2.0), of(3.0)]
    for life in lives:
        holding.note(life, "r", own(life, 400))
        holding.rest(life, "r")
        now[0] += 20
    assert holding.told() == []
    holding._is_known, holding._youngest, holding._room = True, math.inf, 900
    for life in lives:
        holding.note(life, "r", own(life, 400))
    assert (holding._room, holding._youngest) == (100, 2.0)


async def test_a_prompt_of_siblings_counts_at_the_oldest_that_is_there() -> None:
    now, server = [0.0], Server()
    holding, away, sibling = Holding(server.ask, lambda: now[0]), of(1.0, "g"), of(2.0, "g")
    for life in (sibling, away):  # the younger one came first
        holding.note(life, "r", list(range(500)))
    assert holding.told() == [(1.0, 500), (2.0, 0)]
    holding._room = 400
    holding.note(away, "r", list(range(500)), 1)
    assert holding._room == 399
    holding.rest(away, "r")
    now[0] += 20
    assert holding.told() == [(2.0, 500)]
    holding.note(sibling, "r", list(range(500)), 1)
    assert holding._room == 398


async def test_a_turn_that_waits_from_the_beginning_is_held() -> None:
    server = Server()
    holding, old, young = Holding(server.ask), of(1.0), of(2.0)
    for life in (old, young):
        holding.note(life, "r", own(life, 600))
    waiting = asyncio.ensure_future(holding.let_in(young))
    await holding.let_in(old)
    await settle()
    old.leave()
    await asyncio.wait_for(waiting, 60)
    assert young.held_s > 0


async def test_a_question_that_is_cancelled_is_no_answer() -> None:
    async def cancelled(_: Any) -> None:
        raise asyncio.CancelledError

    holding, life = Holding(cancelled), of(1.0)
    holding.note(life, "r", [1])
    await asyncio.wait_for(holding.let_in(life), 60)


async def test_one_that_waits_needs_room_for_some_turns() -> None:
    server = Server()
    holding, old, young = Holding(server.ask), of(1.0), of(2.0)
    for tokens in (100, 200):
        for life in (old, young):
            holding.note(life, "r", own(life, tokens))
    assert holding.told() == [(1.0, 300), (2.0, 300)]
    holding._is_known, holding._youngest = True, 1.0
    assert holding.told() == [(1.0, 300), (2.0, 600)]


async def test_a_server_that_does_not_tell_its_use_is_not_waited_for() -> None:
    async def nothing(_: Any) -> None:
        return None

    async def dead(_: Any) -> CacheReport:
        raise RuntimeError("the actor has died")

    for ask in (nothing, dead):
        holding, young = Holding(ask), of(2.0)
        holding._youngest = 1.0  # the server's earlier answer
        holding.note(young, "r", [1])
        await holding.let_in(young)
        assert (holding._held, holding._youngest) == ({}, math.inf)


async def test_one_that_is_cancelled_or_over_leaves_nothing_behind() -> None:
    server = Server()
    holding, old, young = Holding(server.ask), of(1.0), of(2.0)
    holding.note(old, "r", own(old, 900))
    holding.note(young, "r", own(young, 100))
    await holding.let_in(old)
    await settle()
    waiting = asyncio.ensure_future(holding.let_in(young))
    await settle()
    assert (waiting.done(), len(holding._held)) == (False, 1)
    waiting.cancel()
    await settle()
    assert waiting.cancelled()
    assert not holding._held
    later = asyncio.ensure_future(holding.let_in(young))
    await settle()
    old.leave()
    await asyncio.wait_for(later, 60)  # the next request shows that there is room
    assert young.held_s > 0
