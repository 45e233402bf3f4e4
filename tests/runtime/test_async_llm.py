"""AsyncLLM: many consumers at once, and what happens when one leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_run import LLM, AsyncLLM, EagleError, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPTS = ["hello", "a second one", "and the third, which is longer", "four"]


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_bundle, threads=1, batch=2)
    yield llm
    llm.close()


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


def test_consumers_side_by_side_get_what_they_would_alone(llm: AsyncLLM, tiny_bundle: Path) -> None:
    expected = [output.outputs[0] for output in LLM(tiny_bundle, threads=1).generate(PROMPTS, GREEDY)]

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS))

    outputs = asyncio.run(ask())
    assert [output.outputs[0].token_ids for output in outputs] == [each.token_ids for each in expected]
    assert [output.outputs[0].text for output in outputs] == [each.text for each in expected]

    async def stream(prompt: str) -> str:
        return "".join([delta.outputs[0].text async for delta in llm.stream(prompt, GREEDY)])

    async def chat() -> str:
        messages = [{"role": "user", "content": "hello"}]
        return [output.outputs[0].text async for output in llm.chat(messages, GREEDY)][-1]

    assert asyncio.run(stream(PROMPTS[1])) == expected[1].text
    assert (
        asyncio.run(chat())
        == LLM(tiny_bundle, threads=1).chat([{"role": "user", "content": "hello"}], GREEDY)[0].outputs[0].text
    )


def idle(llm: AsyncLLM) -> bool:
    """Within a while: the engine's thread takes the abort between two rounds."""
    limit = time.monotonic() + 20
    while not llm.engine.is_idle and time.monotonic() < limit:
        time.sleep(0.005)
    return llm.engine.is_idle


def test_a_cancelled_consumer_frees_its_slot(llm: AsyncLLM) -> None:
    """Both slots are taken; when one consumer is cancelled the waiting request gets its slot."""

    async def ask() -> tuple[RequestOutput, int]:
        started = asyncio.Event()

        async def endless(number: int) -> int:
            count = 0
            async for output in llm.generate(PROMPTS[number], LONG):
                count = len(output.outputs[0].token_ids)
                started.set()
            return count

        first, second = (asyncio.create_task(endless(number)) for number in (0, 1))
        await started.wait()
        waiting = asyncio.create_task(last(llm, PROMPTS[2]))
        first.cancel()
        output = await waiting
        assert first.cancelled() or first.done()
        return output, await second

    output, count = asyncio.run(ask())
    assert output.finished
    assert count == 150
    assert idle(llm)


def test_a_closed_iterator_ends_its_request(llm: AsyncLLM) -> None:
    async def ask() -> None:
        stream = llm.generate("hello", LONG)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(ask())
    assert idle(llm)


def test_abort_tells_the_consumer(llm: AsyncLLM) -> None:
    async def ask() -> RequestOutput:
        outputs = []
        async for output in llm.generate("hello", LONG, "mine"):
            llm.abort("mine")
            outputs.append(output)
        return outputs[-1]

    output = asyncio.run(ask())
    assert output.outputs[0].finish_reason == "abort"
    assert idle(llm)


def test_a_request_that_cannot_be_decoded_fails_alone(llm: AsyncLLM) -> None:
    async def ask() -> list[RequestOutput | BaseException]:
        return await asyncio.gather(last(llm, "x" * 500), last(llm, "hello"), return_exceptions=True)

    failed, answered = asyncio.run(ask())
    assert isinstance(failed, EagleError)
    assert "500 tokens" in str(failed)
    assert isinstance(answered, RequestOutput)
    assert len(answered.outputs[0].token_ids) == 24


def test_nonsense_does_not_stop_the_engine(llm: AsyncLLM) -> None:
    async def ask() -> None:
        for prompt, params in ((["a", None], GREEDY), ("hello", {"temperature": 0}), ([[1], [2]], GREEDY)):
            with pytest.raises((EagleError, TypeError)):
                [output async for output in llm.generate(prompt, params)]  # type: ignore[arg-type]
        assert (await last(llm, "hello")).finished

    asyncio.run(ask())


def test_an_id_that_is_taken_is_refused(llm: AsyncLLM) -> None:
    async def ask() -> None:
        first = llm.generate("hello", LONG, "same")
        await anext(first)
        with pytest.raises(EagleError, match="unfinished request 'same'"):
            await anext(llm.generate("hello", LONG, "same"))
        assert not (await anext(first)).finished  # the first one goes on

    asyncio.run(ask())
    assert idle(llm)


def test_a_round_that_fails_reaches_its_consumers_and_the_engine_goes_on(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = llm.engine._round, iter(range(1000))

    def broken(*arguments: object) -> None:
        if next(calls) == 2:
            raise RuntimeError("the device is gone")
        true(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine, "_round", broken)

    async def ask() -> list[RequestOutput | BaseException]:
        return await asyncio.gather(last(llm, "hello"), last(llm, "you"), return_exceptions=True)

    assert all("the device is gone" in str(error) for error in asyncio.run(ask()))
    assert asyncio.run(last(llm, "hello")).finished


def test_close_ends_what_is_unfinished(tiny_bundle: Path) -> None:
    async def ask() -> None:
        async with AsyncLLM(tiny_bundle, threads=1) as llm:
            stream = llm.generate("hello", LONG)
            await anext(stream)
            await asyncio.to_thread(llm.close)
            with pytest.raises(EagleError, match="closed before the request was finished"):
                [output async for output in stream]
            with pytest.raises(EagleError, match="is closed"):
                await anext(llm.generate("hello", LONG))

    asyncio.run(ask())
