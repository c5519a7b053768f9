"""First turns: one leads, and those that begin alike follow when its prompt is read."""

import asyncio

import pytest

from verl_multiturn.rollout.cache.leads import Lead, Leads
from verl_multiturn.rollout.life import Life, live

PROMPT = list(range(200))


def sibling(group: str = "g") -> Life:
    return Life("r", group)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_siblings_wait_until_the_leads_prompt_is_read() -> None:
    leads, read = Leads(600.0), asyncio.Event()
    lead = await leads.go_ahead(sibling(), PROMPT)
    assert len(lead.blocks) == 4  # 64 + 64 + 64 + 8 tokens
    followers = [asyncio.ensure_future(leads.go_ahead(sibling(), PROMPT)) for _ in range(3)]
    await settle()
    lead.sent(read.wait)
    await settle()
    assert not any(follower.done() for follower in followers)
    read.set()
    assert [own.blocks for own in await asyncio.gather(*followers)] == [[], [], []]
    assert (await leads.go_ahead(sibling(), PROMPT)).blocks == []  # one that comes later need not wait


async def test_nobody_asks_the_server_for_a_lead_without_followers() -> None:
    leads, asked = Leads(600.0), []

    async def ask() -> None:
        asked.append(True)

    lead = await leads.go_ahead(sibling(), PROMPT)
    lead.sent(ask)
    await settle()
    leads.over(lead, was_read=True)
    await leads.go_ahead(sibling(), PROMPT)
    assert not asked


@pytest.mark.parametrize("fails", [True, False])
async def test_a_lead_that_fails_or_is_cancelled_hands_over(fails: bool) -> None:
    leads = Leads(600.0)
    lead = await leads.go_ahead(sibling(), PROMPT)
    second, third = (asyncio.ensure_future(leads.go_ahead(sibling(), PROMPT)) for _ in range(2))
    await settle()
    if fails:
        leads.over(lead, was_read=False)
    else:
        leads.over(lead, was_read=True)
    own = await second
    await settle()
    assert (len(own.blocks), third.done()) == ((4, False) if fails else (0, True))
    leads.over(own, was_read=True)
    assert (await third).blocks == []


async def test_a_server_that_cannot_say_it_holds_nobody_up() -> None:
    async def ask() -> None:
        raise RuntimeError("the actor has died")

    leads = Leads(600.0)
    (await leads.go_ahead(sibling(), PROMPT)).sent(ask)
    assert (await leads.go_ahead(sibling(), PROMPT)).blocks == []


async def test_a_slow_lead_is_waited_for_no_longer_than_the_bound() -> None:
    leads, late = Leads(0.05), sibling()
    lead = await leads.go_ahead(sibling(), PROMPT)
    own = await leads.go_ahead(late, PROMPT)
    assert (own.blocks, lead.is_over.is_set()) == ([], False)
    assert (late.led_s > 0, late.held_s) == (True, 0)


async def test_what_is_alike_in_part_is_waited_for_and_the_rest_is_led() -> None:
    """Agents of several groups share their system text and tools."""
    leads = Leads(600.0)
    lead = await leads.go_ahead(sibling("a"), PROMPT)
    other = asyncio.ensure_future(leads.go_ahead(sibling("b"), [*PROMPT[:150], *range(500, 600)]))
    apart = await leads.go_ahead(sibling("c"), list(range(1, 100)))
    await settle()
    assert (len(apart.blocks), other.done()) == (2, False)
    leads.over(lead, was_read=True)
    assert len((await other).blocks) == 2  # 128 of 250 tokens are those of the lead


async def test_nothing_is_remembered_of_conversations_that_are_over() -> None:
    leads = Leads(600.0)
    with live(Life("r", "g")) as first, live(Life("r", "g")) as second:
        lead = await leads.go_ahead(first, PROMPT)
        leads.over(lead, was_read=True)
        await leads.go_ahead(second, PROMPT)
        assert lead.users == 2
    assert (leads._of_block, leads._used) == ({}, {})


async def test_an_emptied_cache_is_read_anew() -> None:
    leads = Leads(600.0)
    leads.over(await leads.go_ahead(sibling(), PROMPT), was_read=True)
    leads.clear()
    again: Lead = await leads.go_ahead(sibling(), PROMPT)
    assert len(again.blocks) == 4
