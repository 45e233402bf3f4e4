"""One answer as it comes, with log-probabilities: `python examples/streaming.py BUNDLE`."""

from __future__ import annotations

import sys

from eagle_run import LLM, SamplingParams


def main(bundle: str) -> None:
    """Prints the text round by round, then the tokens that the target was least sure of."""
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=0)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    unsure = []
    with LLM(bundle) as llm:
        for delta in llm.stream(messages, params):
            completion = delta.outputs[0]
            print(completion.text, end="", flush=True)
            for token, entries in zip(completion.token_ids, completion.logprobs or (), strict=True):
                unsure.append((entries[token].logprob, entries[token].decoded_token))
    print("\nleast sure of:", ", ".join(f"{text!r} ({logprob:.2f})" for logprob, text in sorted(unsure)[:3]))


if __name__ == "__main__":
    main(sys.argv[1])
