"""The prompts of an experiment: built-in short ones whose answers differ in kind, or a file's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from k3dspark.errors import BadInput

PROMPTS: Final = (
    "Explain in a few sentences why bread rises in the oven.",
    "Write a Python function that returns the largest number in a list.",
    "A train travels 180 km in 3 hours. What is its average speed? Show the steps.",
    "Rewrite this politely: Send me the report now.",
    "What are three ways to save water at home?",
    "Write a SQL query that counts the orders of each customer.",
    "Write the numbers from 1 to 20, separated by commas.",
    "Give me a short recipe for tomato soup.",
    "What is photosynthesis?",
    "Write a short letter that thanks a teacher.",
    "Tom has 24 apples and gives a third of them to Ana. How many does he keep?",
    "Write a JavaScript function that reverses a string.",
    "Name the planets of the solar system in order.",
    "Describe a rainy morning in a small town.",
    "What is the difference between weather and climate?",
    "Translate into French: The library opens at nine o'clock.",
    "How does a bicycle stay upright?",
    "Write a Python loop that prints the squares from 1 to 10.",
    "Summarise the water cycle in three sentences.",
    "What is 15 % of 240? Explain how you found it.",
    "Give two reasons for learning a second language.",
    "Write an HTML page with a title and one paragraph.",
    "Tell a story of four sentences about a lost key.",
    "Why is the sky blue during the day and red in the evening?",
    "List five useful shell commands and what each does.",
    "A rectangle is 7 cm long and 4 cm wide. Find its area and its perimeter.",
    "How do vaccines protect people?",
    "Write an email that moves a meeting from Monday to Thursday.",
    "What is a prime number? Give five examples.",
    "Explain recursion with a small example in Python.",
    "What should I pack for a weekend in the mountains?",
    "Correct this sentence: She don't likes the apples which is green.",
    "用一句话说明什么是人工智能。",
    "Describe how to make a cup of green tea.",
    "How many minutes are there in a week? Show the calculation.",
    "Write a C function that adds two integers.",
    "Who was Marie Curie, and what is she known for?",
    "Make a table of three fruits and their colours.",
    "What happens when ice melts?",
    "Write a poem of four lines about the sea.",
)


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, blank lines left out. Raises `BadInput` for a file that cannot be read."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}", str(error), "pass a UTF-8 text, one prompt a line") from error
