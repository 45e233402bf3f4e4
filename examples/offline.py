"""Many prompts at once: `python examples/offline.py BUNDLE`."""

from __future__ import annotations

import sys

from eagle_run import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "A haiku about rain:"]


def main(bundle: str) -> None:
    """Two answers to each prompt, and what speculation brought."""
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32, seed=1, n=2)
    with LLM(bundle, batch=4) as llm:
        for output in llm.generate(PROMPTS, params):
            print(output.prompt)
            for completion in output.outputs:
                print(f"  [{completion.index}] {completion.text!r} ({completion.finish_reason})")
            print(f"  {output.metrics.tokens_per_round:.2f} tokens per round")


if __name__ == "__main__":
    main(sys.argv[1])
