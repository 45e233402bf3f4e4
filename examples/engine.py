"""The engine by hand, round by round: `python examples/engine.py BUNDLE`."""

from __future__ import annotations

import sys

from eagle_run import LLM, RequestOutputKind, SamplingParams


def main(bundle: str) -> None:
    """A second request joins the first after three rounds; the first is ended before it is done."""
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    engine = LLM(bundle, batch=2).engine
    engine.add_request("first", "Once upon a time", params)
    rounds = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(f"{rounds:3} {output.request_id:6} {output.outputs[0].text!r}")
        rounds += 1
        if rounds == 3:
            engine.add_request("second", "The quick brown fox", params)
        if rounds == 8:
            engine.abort_request("first")


if __name__ == "__main__":
    main(sys.argv[1])
