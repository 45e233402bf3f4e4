"""A conversation on standard input and output: `python examples/chat.py BUNDLE`."""

from __future__ import annotations

import sys

from eagle_run import LLM, SamplingParams


def main(bundle: str) -> None:
    """Answers each line; the whole conversation is the prompt of the next answer."""
    params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=64)
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    with LLM(bundle) as llm:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            (output,) = llm.chat(messages, params)
            text = output.outputs[0].text
            messages.append({"role": "assistant", "content": text})
            print(text)


if __name__ == "__main__":
    main(sys.argv[1])
