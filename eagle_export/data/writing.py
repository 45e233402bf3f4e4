"""Turns of the user that the target writes itself: sampled where its chat template lets the user speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eagle_export.data.conversation import Conversation, end_of_turn
from eagle_export.data.generator import Generator, Reply
from eagle_export.data.openings import Opening, Openings
from eagle_export.data.settings import OPENING, WRITE, DataSettings, mixed
from eagle_run.engine.offline import OfflineRequest
from eagle_run.params import SamplingParams

LONGEST_TURN = 192  # tokens; longer ones have lost their thread
_LEAST_LETTERS = 2


def write_turns(
    generator: Generator,
    settings: DataSettings,
    openings: Openings,
    talks: Sequence[Conversation],
    on_tokens: Callable[[int], None],
) -> list[str | None]:
    """What the user says next in each conversation; None where the target came to no end.

    First turns begin with an opening, some of which are whole prompts already; later ones begin freely.
    """
    drawn = [
        openings.draw(mixed(talk.seed, OPENING)) if talk.turn == 0 else Opening("", whole=False)
        for talk in talks
    ]
    said: list[str | None] = [opening.text if opening.whole else None for opening in drawn]
    if all(opening.whole for opening in drawn):
        return said
    text = generator.text
    tokens, strings = end_of_turn(text)
    places, requests = [], []
    for place, (talk, opening) in enumerate(zip(talks, drawn, strict=True)):
        prompt = talk.before_turn(text) + text.encode(opening.text, add_special_tokens=False)
        room = min(LONGEST_TURN, generator.max_seq_len - len(prompt))
        if talk.turn == 0:
            room = min(room, settings.max_prompt_tokens - len(prompt))
        if not opening.whole and room > 0:
            places.append(place)
            params = SamplingParams(
                temperature=settings.prompt_temperature,
                top_k=settings.top_k,
                seed=mixed(talk.seed, WRITE, talk.turn),
                max_tokens=room,
                stop=strings,
                stop_token_ids=sorted(tokens),
                detokenize=bool(strings),  # text is made only where its end depends on it
            )
            requests.append(OfflineRequest(tuple(prompt), params))
    replies = generator.run(requests, on_tokens)
    for place, request, reply in zip(places, requests, replies, strict=True):
        said[place] = _written(generator, request, reply, drawn[place].text)
    return said


def _written(generator: Generator, request: OfflineRequest, reply: Reply, opening: str) -> str | None:
    if reply.finish_reason != "stop":
        return None
    new = [token for token in reply.tokens if token not in (request.params.stop_token_ids or ())]
    # Decoded with what is before, since some decoders drop a blank at the beginning.
    before = generator.text.decode(request.prompt_token_ids, skip_special_tokens=False)
    whole = generator.text.decode([*request.prompt_token_ids, *new], skip_special_tokens=False)
    words = whole[len(before) :]
    for string in request.params.stop or ():
        words = words.partition(string)[0]
    said = (opening + words).strip()
    sound = "\ufffd" not in said and sum(letter.isalnum() for letter in said) >= _LEAST_LETTERS
    return said if sound else None
