"""Short prompts of many kinds, to calibrate on and to measure with where the user brings none of their own.

They were written for this project: no benchmark's questions are among them.
"""

from __future__ import annotations

PROMPTS = (
    "Explain to a child why the moon seems to follow the car at night.",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "A shop sells pens at 3 for 2 euros. What do 15 pens cost? Show your steps.",
    "Give me a simple recipe for lentil soup with five ingredients.",
    "Translate into French: 'The library closes at six on Fridays.'",
    "Write the opening paragraph of a story about a lighthouse keeper who finds a letter.",
    "List three differences between a frog and a toad.",
    "My laptop does not start after an update. What should I try first?",
    "Summarise in one sentence: Rivers carry sand to the sea, where waves build it into beaches.",
    "Write an SQL query that counts orders per customer for the last 30 days.",
    "What are the arguments for and against homework in primary school?",
    "Reply politely to an invitation to a wedding that I cannot attend.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Correct the grammar: 'She don't has no time for go there yesterday.'",
    "If all bloops are razzies and some razzies are lazzies, must some bloops be lazzies?",
    "Write a haiku about the first snow on a railway platform.",
    "Explain what a hash table is and when it is slow.",
    "Plan a weekend in Lisbon for two people who like food and walking.",
    "Solve for x: 4x - 7 = 2x + 9.",
    "Write a JavaScript snippet that waits for two requests and prints both results.",
    "How does a vaccine prepare the immune system? Use everyday words.",
    "Turn this into a table: Anna is 31 and from Oslo, Ben is 27 and from Porto.",
    "Name a film, a book and a song about the sea, with one line on each.",
    "Write a product description for a folding bicycle, about fifty words.",
)
