"""The gateway's connections to several servers: a conversation keeps to one, and a dead one is not asked every time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from models.serving.openai_api.errors import ApiError
from models.serving.upstreams.http import Pool, Servers
from models.vllm.balance import Balance
from tests.models.vllm_backend.vllm_stub import vllm_stub

NOBODY = "http://127.0.0.1:9"
BODY = b'{"model": "base", "prompt": [1], "max_tokens": 1, "return_token_ids": true}'


async def asked(pool: Pool, conversations: Sequence[str]) -> list[str]:
    """Who answers each, one after the other."""
    found = []
    for conversation in conversations:
        async with pool.post("/v1/completions", BODY, (), conversation) as (address, response):
            await response.read()
            found.append(address)
    return found


def test_a_conversation_keeps_to_its_server_and_others_use_all() -> None:
    async def all_of_it(urls: list[str]) -> None:
        pool = Pool(Servers(urls))
        # A hash of name and port decides; of twelve names one run in 2,048 sent all to one server.
        names = [f"c{i}" for i in range(60)]
        first = await asked(pool, names)
        assert set(first) == set(urls)
        assert await asked(pool, names) == first
        await pool.close()

    with vllm_stub() as one, vllm_stub() as two:
        asyncio.run(all_of_it([one.url, two.url]))


def test_a_server_that_nobody_answers_at_is_tried_once_a_pause_and_used_when_it_is_the_only_one() -> None:
    async def all_of_it(url: str) -> None:
        pool, now = Pool(Servers([NOBODY, url])), [100.0]
        pool.balance = Balance(pool.addresses, lambda: now[0])
        names = [f"c{i}" for i in range(12)]
        assert Counter(await asked(pool, names)) == {url: 12}
        assert pool.retries == 1
        now[0] += 1.0
        await asked(pool, names)
        assert pool.retries == 2
        await pool.close()
        alone = Pool(Servers([NOBODY]))
        for _ in range(2):
            with pytest.raises(ApiError, match="no server behind the gateway answers"):
                await asked(alone, ["c"])
        await alone.close()

    with vllm_stub() as stub:
        asyncio.run(all_of_it(stub.url))


def test_a_server_that_fails_three_times_in_a_row_is_left_to_the_others() -> None:
    async def all_of_it(urls: list[str]) -> list[str]:
        pool = Pool(Servers(urls))
        pool.balance = Balance(pool.addresses, lambda: 100.0)
        found = await asked(pool, [f"c{i}" for i in range(40)])
        await pool.close()
        return found

    with vllm_stub() as broken, vllm_stub() as sound:
        broken.failures = [500] * 40
        found = asyncio.run(all_of_it([broken.url, sound.url]))
        assert found.count(broken.url) == 3
