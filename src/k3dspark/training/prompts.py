"""Self-written training prompts: openings that the target completes into user turns, and filled templates.

No data set is needed or shipped. Two sources, mixed half and half:

* *openings*: the first words of a user turn; the target itself writes the rest of the turn
  (the answer it then gives is its own, so the draft is trained on the target's distribution);
* *templates*: complete requests with slots filled from word lists.

Held-out evaluation prompts are written by hand elsewhere and checked against these by `overlaps`.
"""

from __future__ import annotations

import random
import re

OPENINGS: tuple[str, ...] = (
    # free: the target chooses the subject
    "", "", "", "", "What", "How", "Why", "Can you", "Could you please", "I", "I'm", "I need", "Please", "Tell me",
    "Is", "Are", "Do", "Does", "When", "Where", "Who", "Which", "Should", "Hi,", "Hello!", "My",
    # questions
    "What is the", "What are the main", "What causes", "What happens when", "What is the difference between",
    "How does a", "How do I", "How do plants", "How can I improve my", "How many", "Why do", "Why does the", "Why is it",
    "Explain how", "Explain the concept of", "Explain in simple terms", "Describe the", "Define the term",
    "Who invented", "Who was", "When did", "Where does", "Give me an example of", "Compare", "Summarize the history of",
    "What are the benefits of", "What would happen if", "Is it true that", "Can animals", "Tell me about the",
    "What does the word", "What is the capital of", "What is the best way to", "How long does it take to",
    # arithmetic
    "A farmer has", "A train travels", "A shop sells", "If a box contains", "Tom has", "Sarah bought", "Maria has",
    "There are", "A rectangle has", "John runs", "A recipe needs", "Each student in a class", "If 3 pencils cost",
    "A car uses", "Emma saves", "What is 15% of", "Calculate the", "Solve for x:", "A bus leaves", "A bakery makes",
    "Lily read", "Twelve friends share", "A tank holds", "The price of a jacket", "Ben is 4 years older than",
    # code
    "Write a Python function", "Write a function that", "Write a short program", "Write a JavaScript function",
    "Write code to", "Implement a", "Fix the bug in this code:", "What does this code do?", "In Python, how do I",
    "Write a class", "Write a SQL query", "Write a loop that", "Write a Python script that", "How do I reverse",
    "Write a recursive function", "Write a bash command", "Explain this Python code:", "Write a C function",
    # rewriting and editing
    "Rewrite the following sentence", "Rewrite this in a formal tone:", "Make this sentence shorter:",
    "Correct the grammar:", "Paraphrase:", "Translate to French:", "Turn this into a question:", "Simplify:",
    "Summarize this paragraph:", "Change the following to past tense:", "Rewrite the email below", "Make this more polite:",
    "Improve this sentence:", "Rephrase the following text", "Convert this to passive voice:", "Proofread:",
    # writing
    "Write an email", "Write a short story about", "Write a poem about", "Write a paragraph about", "Write a letter to",
    "Give me advice", "Write a product description", "Write a message", "Suggest", "Plan a", "Describe a", "Imagine",
)

_NAMES = ["Tom", "Sarah", "Maria", "John", "Emma", "Ben", "Lily", "Ahmed", "Priya", "Carlos", "Nina", "Oscar", "Ruth", "Victor", "Wendy", "Hugo", "Grace", "Leo", "Ivy", "Sam"]
_ITEMS = ["apples", "pencils", "books", "marbles", "oranges", "cookies", "stickers", "tickets", "eggs", "bottles", "stamps", "cards", "flowers", "chairs", "shirts"]
_PLACES = ("the school", "the market", "a small shop", "the library", "the farm", "a factory", "the zoo", "the bakery")
_TOPICS = (
    "photosynthesis", "gravity", "the water cycle", "black holes", "inflation", "volcanoes", "the immune system", "magnets",
    "electric cars", "the Roman Empire", "vaccines", "DNA", "rainbows", "the stock market", "earthquakes", "recycling",
    "the internet", "machine learning", "solar panels", "the moon landing", "tides", "coffee", "sleep", "honey bees",
    "climate change", "democracy", "the French Revolution", "computer memory", "antibiotics", "the heart", "evolution",
    "batteries", "glaciers", "supply and demand", "clouds", "sound waves", "nuclear power", "the Silk Road", "yeast",

    "mirrors", "elevators", "cheese", "the Moon", "Mars", "whales", "penguins", "spiders",
    "migraines", "allergies", "insurance", "mortgages", "taxes", "the United Nations", "World War I", "the Renaissance",
    "Shakespeare", "Mozart", "the piano", "basketball", "yoga", "vitamins", "protein", "sugar", "salt", "soap", "plastic",
    "steel", "diamonds", "oil", "hydrogen", "lasers", "radar", "GPS", "robots", "drones", "smartphones", "email", "Linux",
    "the Olympic Games", "chocolate", "tea", "rice", "deserts", "rivers", "hurricanes", "snow", "fire", "muscles", "bones",
    "memory", "stress", "habits", "procrastination", "teamwork", "leadership", "marketing", "trade",
    "cities", "bridges", "trains", "bicycles", "maps", "calendars", "money", "gold", "libraries", "newspapers", "privacy",
    "encryption", "lightning", "plate tectonics", "chess", "the digestive system", "public transport", "jazz music",
    "the Great Wall of China", "wind turbines", "the human eye", "bread", "satellites", "dreams", "coral reefs", "trees",
)
_AUDIENCES = ("a child", "a beginner", "a high school student", "my grandmother", "an engineer", "a ten year old", "a friend")
_QUESTIONS = (
    "What is {t}?", "How does {t} work?", "Why is {t} important?", "Explain {t} to {a}.", "Tell me about {t}.",
    "What should I know about {t}?", "Describe {t} in a few sentences.", "What are some common misconceptions about {t}?",
    "Give a brief overview of {t}.", "Write a short paragraph about {t}.", "What is the history of {t}?",
    "How has {t} changed over time?", "What problems are related to {t}?", "Can you explain {t} in simple words?",
    "Write a short essay about {t}.", "What is one interesting fact about {t}?", "How does {t} affect people?",
    "Why do scientists study {t}?", "In two sentences, what is {t}?", "Explain the basics of {t} for {a}.",
    "What makes {t} special?", "What are the advantages and disadvantages of {t}?", "Where does {t} come from?",
    "Who is most affected by {t}, and why?", "What is the difference between {t} and {u}?", "List three facts about {t}.",
    "How are {t} and {u} related?", "What is the biggest challenge with {t}?", "Is {t} good or bad for us?",
    "What do experts say about {t}?", "When did people first learn about {t}?", "What happens if {t} disappears?",
)
_WORD_PROBLEMS = (
    "{n} has {x} {i}. {m} gives {n} {y} more. How many {i} does {n} have now?",
    "{n} had {x} {i} and gave away {y} of them. How many {i} are left?",
    "Each box holds {y} {i}. How many {i} are in {x} boxes?",
    "A pack of {i} costs ${y}. How much do {x} packs cost?",
    "{n} reads {y} pages every day. How many pages does {n} read in {x} days?",
    "A car drives at {x} miles per hour for {y} hours. How far does it go?",
    "There are {x} students in a class. {y} of them are absent. How many are present?",
    "{n} earns ${x} per hour and works {y} hours. How much does {n} earn?",
    "{n} buys {x} {i} for ${y} each and pays with a $1000 bill. How much change does {n} get?",
    "{x} {i} are shared equally among {y} friends. How many does each friend get?",
    "A rectangle is {x} cm long and {y} cm wide. What is its area?",
    "A rectangle has a length of {x} meters and a width of {y} meters. What is the perimeter?",
    "{n} is {y} years old and {m} is {x} years older. How old is {m}?",
    "At {p} there are {x} {i} in the morning. {y} are sold. How many remain in the evening?",
    "What is {x} plus {y}?", "What is {x} times {y}?", "Calculate {x} - {y}.", "What is {y}% of {x}00?",
    "If {n} walks {y} km a day, how far does {n} walk in {x} days?",
    "{n} saves ${y} every week. How many weeks does it take to save ${x}0?",
    "A train leaves at {y} o'clock and arrives {x} minutes later. When does it arrive?",
    "{n} has twice as many {i} as {m}. {m} has {x}. How many do they have together?",
)
_CODE = (
    "Write a Python function that {w}.", "Write a function in JavaScript that {w}.", "How do I write Python code that {w}?",
    "Write a short Python program that {w}. Explain it.", "Implement a Java method that {w}.", "Show me code that {w}.",
    "Write a Python function called `solve` that {w}.", "I need a small script that {w}.", "Write a C++ function that {w}.",
)
_CODE_TASKS = (
    "returns the largest number in a list", "checks whether a string is a palindrome", "computes the factorial of n",
    "counts the vowels in a string", "reverses a string", "sorts a list of numbers", "removes duplicates from a list",
    "reads a file and prints each line", "finds the sum of all even numbers in a list", "checks if a number is prime",
    "converts Celsius to Fahrenheit", "merges two dictionaries", "returns the n-th Fibonacci number", "flattens a nested list",
    "counts how often each word appears in a text", "finds the second largest element of a list", "prints a triangle of stars",
    "computes the average of a list", "swaps two variables", "checks whether two words are anagrams", "generates a random password",
    "calculates the area of a circle", "parses a date string", "finds the longest word in a sentence", "multiplies two matrices",
    "returns the common elements of two lists", "validates an email address", "implements binary search", "implements a stack",
    "prints the multiplication table of a number", "converts a number to binary", "finds the greatest common divisor of two numbers",
    "counts the lines in a file", "rotates a list by k positions", "capitalizes every word in a sentence", "sums the digits of a number",
)
_REWRITES = (
    "Rewrite this sentence in a more formal way: {s}", "Make this sentence shorter: {s}", "Paraphrase the following: {s}",
    "Correct the grammar of this sentence: {s}", "Rewrite the following in the past tense: {s}", "Make this friendlier: {s}",
    "Rewrite this for {a}: {s}", "Turn this into a polite request: {s}", "Summarize in one sentence: {s}", "Rephrase: {s}",
    "Rewrite the text below so that it is clearer.\n\n{s}", "Change this sentence to the passive voice: {s}", "Expand this: {s}",
    "Edit the following text for clarity: {s}",

    "Simplify this text: {s}", "Make this text easier to read: {s}", "Say the following in fewer words: {s}",
    "Make this text more formal. {s}",
    "Rewrite as a question: {s}", "{s}\n\nRewrite the text above in simpler words.",
    "{s}\n\nSummarize this.", "Rewrite this paragraph to make it more engaging: {s}", "Can you improve this text? {s}",
    "Translate this into plain English: {s}", "Write this as an advertisement: {s}", "Make this sound more positive: {s}",
    "Rewrite this as a news headline: {s}", "Say this in another way: {s}", "Write a shorter version of this: {s}",
    "Rewrite this message to a colleague: {s}", "Fix the mistakes in this text: {s}", "Rewrite this for {a}. {s}",
)
_SENTENCES = (
    "The meeting was moved to Friday because the manager is sick.", "i want you to send me the report now.",
    "The dog chased the cat across the busy street.", "She dont like to eat vegetables but she eat fruit.",
    "We are going to be late if you do not hurry up.", "The company's profits fell last year due to higher costs.",
    "Our team finished the project two weeks early.", "The food was cold and the service was slow.", "He go to school every day.",
    "Thanks for the help with my computer yesterday.", "The new phone has a better camera and a longer battery life.",
    "It is raining, so the game has been cancelled.", "The children are playing in the garden.", "Me and him was at the park.",
    "Students should study every day if they want good grades.", "The city plans to build a new bridge over the river.",
    "I can't come to the party on Saturday.", "The teacher gave the students a difficult test.", "Your order will arrive late.",
    "The scientist discovered a new kind of frog in the forest.", "Please tell the customer that we are out of stock.",
    "Many people believe that exercise is good for health.", "The movie was too long and the story was hard to follow.",
    "The old house on the hill has been empty for ten years.", "We need more time to finish this work properly.",
)
_WRITING = (
    "Write an email to {r} about {e}.", "Write a short message to {r} about {e}.", "Write a polite letter to {r} about {e}.",
    "Help me tell {r} about {e}.", "What should I say to {r} about {e}?", "Write a short story about {e}.",
    "Write a short poem about {t}.", "Write a product description for {i}.", "Give me advice about {e}.",
    "Write three sentences about {e}.", "Describe a day at {p}.", "Write a short dialogue between {n} and {m} about {t}.",
)
_PEOPLE = ("my boss", "my neighbor", "a customer", "my teacher", "a friend", "the landlord", "my team", "a job applicant")
_EVENTS = (
    "a late delivery", "a job interview", "a birthday party", "moving to a new city", "a broken window", "learning to cook",
    "a lost dog", "a delayed flight", "asking for a raise", "the noise at night", "a school trip", "a missing invoice",
    "starting a garden", "saving money", "a team meeting", "a rainy weekend", "getting a refund", "changing an appointment",
)


def template_prompt(rng: random.Random, texts: list[str] | None = None) -> str:
    """One complete request from the templates; the mix favours the kinds ordinary users send.

    `texts` are passages to rewrite, used beside the built-in sentences.
    """
    fill = {
        "t": rng.choice(_TOPICS), "u": rng.choice(_TOPICS), "a": rng.choice(_AUDIENCES), "i": rng.choice(_ITEMS), "p": rng.choice(_PLACES),
        "x": rng.randint(12, 98), "y": rng.randint(2, 12), "w": rng.choice(_CODE_TASKS), "s": rng.choice(texts) if texts and rng.random() < 0.85 else rng.choice(_SENTENCES),
        "r": rng.choice(_PEOPLE), "e": rng.choice(_EVENTS),
    }  # fmt: skip
    fill["n"], fill["m"] = rng.sample(_NAMES, 2)
    kind = rng.choices((_QUESTIONS, _WORD_PROBLEMS, _CODE, _REWRITES, _WRITING), weights=(6, 4, 4, 6, 3))[0]
    return rng.choice(kind).format(**fill)


def passages(answer: str, rng: random.Random) -> list[str]:
    """One or two runs of whole sentences of an answer, 6 to 45 words long: something to rewrite."""
    sentences = [s for s in re.findall(r"[A-Z][^.!?\n:*`#|{}<>]+[.!?](?=\s|$)", answer) if 5 <= len(s.split()) <= 40]
    found = []
    for _ in range(min(2, len(sentences))):
        start = rng.randrange(len(sentences))
        text = " ".join(sentences[start : start + rng.randint(1, 3)])
        if 6 <= len(text.split()) <= 45:
            found.append(text)
    return found


def opening(rng: random.Random) -> str:
    """The first words of a user turn (possibly none), to be completed by the target."""
    return rng.choice(OPENINGS)


def normalized(prompt: str) -> str:
    """Lower-case words only: the form in which prompts are compared and hashed."""
    return " ".join(re.findall(r"[a-z0-9]+", prompt.lower()))


def overlaps(prompt: str, held_out: list[str], words: int = 8) -> bool:
    """True if `prompt` equals a held-out prompt or shares a run of `words` words with one."""
    tokens = normalized(prompt).split()
    runs = {tuple(tokens[i : i + words]) for i in range(max(len(tokens) - words + 1, 1))}
    for other in held_out:
        other_tokens = normalized(other).split()
        if tokens == other_tokens:
            return True
        if any(tuple(other_tokens[i : i + words]) in runs for i in range(len(other_tokens) - words + 1)):
            return True
    return False
