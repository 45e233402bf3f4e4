"""Requests that come and go while others are answered: `python examples/async_requests.py BUNDLE`."""

from __future__ import annotations

import asyncio
import sys

from eagle_run import AsyncLLM, SamplingParams

QUESTIONS = ["What is a fjord?", "Name three trees.", "What is 17 + 25?", "Who wrote Faust?"]
PARAMS = SamplingParams(temperature=0, max_tokens=32)


async def answer(llm: AsyncLLM, question: str, start: float) -> str:
    """The text of an answer to a question that is asked after `start` seconds."""
    await asyncio.sleep(start)
    messages = [{"role": "user", "content": question}]
    text = ""
    async for output in llm.chat(messages, PARAMS):
        text = output.outputs[0].text
    return text


async def ask(bundle: str) -> None:
    """Asks all; a last request is cancelled in the middle, which frees its slot for the others."""
    async with AsyncLLM(bundle, batch=2) as llm:
        tasks = [asyncio.create_task(answer(llm, each, 0.05 * i)) for i, each in enumerate(QUESTIONS)]
        impatient = asyncio.create_task(answer(llm, "Tell me a long story.", 0))
        await asyncio.sleep(0.02)
        impatient.cancel()
        for question, text in zip(QUESTIONS, await asyncio.gather(*tasks), strict=True):
            print(f"{question}\n  {text!r}")


def main(bundle: str) -> None:
    asyncio.run(ask(bundle))


if __name__ == "__main__":
    main(sys.argv[1])
