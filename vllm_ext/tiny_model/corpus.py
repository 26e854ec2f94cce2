"""Text to train the tiny model's tokenizer on: a few paragraphs and an endless stream of simple sentences.

All of it is ASCII and written for this package, so that nothing has to be downloaded. It only has to hold
enough distinct, frequent words for a byte-level BPE to learn some two thousand merges.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

PROSE = """
The harbour wakes before the town does. Ropes creak, a gull walks the length of the pier as though it had been
asked to measure it, and somebody lights the stove in the net loft. By six the first boats are out beyond the
breakwater, small and square against the pale water, and the old women who mend the nets have begun to argue about
the weather, which is how they say good morning.

A queue is an honest thing. Everyone in it can see who came first, and nobody needs to be told the rule. It stops
being fair the moment that one person wants a stamp and the next wants to post four hundred parcels. Then the short
errand waits behind the long one, the clerk is busy all day, and yet most of the people in the room have only been
standing. Let the stamps go ahead and the room empties; let them always go ahead and the parcels never leave.

To bake bread, weigh the flour first and the water second, because water forgives you and flour does not. Mix until
no dry flour is left, cover the bowl and go away. When you come back the dough will have done most of the work. Fold
it four times, wait, fold it again, and heat the oven until the stone is hotter than you think it should be.

Grandmother kept her letters in a tin box under the stairs, sorted by the colour of the ink. Blue was for family,
black for business, and green for a man in Lisbon whom she never mentioned. When the river rose she carried the box
up to the attic before she carried the silver, and nobody who saw her do it ever asked her why.

A memory that is full has to forget something. The simplest rule is to forget what has not been used for the longest
time; a better one asks what it would cost to learn it again. A page that can be read back from the shelf in a moment
is cheap to lose. A long sum worked out by hand is not, even if nobody has looked at it since Tuesday.

The night train to the coast has nine carriages, one of them heated. Passengers who know this arrive early and look
casual. The conductor, who has worked the line for thirty years, lets them sit until the second stop, then walks
through and asks, very politely, to see a ticket for the seat; and one by one they remember that it was warm enough
in the fourth carriage after all.

Maps lie in useful ways. A street is drawn wider than it is so that its name will fit; a hill is shaded as if the sun
always stood in the north-west. Nobody is misled, since everyone wants the same thing from the page, which is to find
the station before it starts to rain.

Please answer the following question in your own words. What is the difference between being early and being quick?
Explain it with an example, list three reasons, and say which of them you would give to a friend. If you do not know,
say so: a short answer that is true is better than a long one that is not.

If the pump stops, close valve 2, open valve 5 and wait until the gauge reads less than 1.5 bar. Write down the time.
Do not restart it more than 3 times in 10 minutes; the motor gets hot and the fuse (25 A) will go. Call the workshop
on extension 417, or 418 at night, and tell them the serial number on the brass plate.

def count_words(text): words = {}; for word in text.split(): words[word] = words.get(word, 0) + 1; return words
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NOUNS = _words("""
river window engine garden letter teacher market signal mountain kettle captain shadow bridge village library
carpenter lantern station neighbour orchard ladder harbour pocket winter summer morning evening kitchen painter
doctor farmer musician student traveller baker sailor weaver clerk driver child mother father sister brother cousin
horse sparrow fox rabbit salmon beetle spider owl table chair blanket mirror candle hammer needle bottle basket
wagon bicycle tram ticket suitcase compass clock calendar notebook pencil drawing number question answer reason
promise secret story poem song drum violin trumpet garden fence gate path road corner tower roof chimney cellar
island valley forest meadow field stream lake storm thunder cloud rainbow snow frost mist sunlight moon planet star
machine computer network message packet queue buffer memory server request response token model weight layer vector
matrix graph cluster worker scheduler budget deadline batch cache page block prefix sample length forecast error
""")
_ADJECTIVES = _words("""
quiet patient narrow broken golden silver wooden distant careful hungry gentle stubborn curious clever honest
ordinary peculiar enormous tiny hollow bitter sweet heavy bright pale crooked smooth rough sudden slow quick early late
familiar foreign empty crowded forgotten famous nervous cheerful lonely reliable expensive useful dangerous modern
ancient frozen burning silent restless generous practical impossible different important beautiful comfortable
""")
_VERBS = _words("""
carries follows remembers repairs measures borrows answers crosses watches paints hides counts opens closes builds
finds loses waters collects describes explains ignores welcomes visits leaves reaches promises delivers schedules
interrupts compares translates discovers protects replaces arranges divides improves examines questions surprises
""")
_PLACES = _words("""
beside under behind above across near toward against inside outside around between beyond without
""")
_ADVERBS = _words("""
slowly quickly carefully suddenly usually rarely always never often again together alone yesterday tomorrow today
politely quietly almost already perhaps certainly gladly
""")
_LINKS = _words("because although while until before after unless whenever and but so")


def sentence(rng: random.Random) -> str:
    """Return one grammatical, pointless English sentence; it advances `rng` and nothing else."""
    text = f"{_clause(rng)}, {rng.choice(_LINKS)} {_clause(rng)}" if rng.random() < 0.4 else _clause(rng)
    if rng.random() < 0.2:
        text = f"{rng.choice(_ADVERBS)} {text}"
    if rng.random() < 0.15:
        text = f"in {rng.randint(1200, 2400)} {text}"
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "?", "!"))


def passage(rng: random.Random, num_words: int) -> str:
    """Return sentences that together have exactly `num_words` words (0 gives the empty string)."""
    words: list[str] = []
    while len(words) < num_words:
        words.extend(sentence(rng).split())
    return " ".join(words[:num_words])


def training_text(num_sentences: int = 6000) -> Iterator[str]:
    """Yield the tokenizer's training text, the same on every call."""
    yield from PROSE.strip().split("\n\n")
    rng = random.Random(20240229)
    for _ in range(num_sentences):
        yield sentence(rng) + " "


def _clause(rng: random.Random) -> str:
    return f"{_phrase(rng)} {rng.choice(_VERBS)} {_phrase(rng)} {rng.choice(_PLACES)} {_phrase(rng)}"


def _phrase(rng: random.Random) -> str:
    article = rng.choice(("the", "the", "every", "one", "that", "no", "my", "their", str(rng.randint(2, 999))))
    if rng.random() < 0.6:
        return f"{article} {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    return f"{article} {rng.choice(_NOUNS)}"
