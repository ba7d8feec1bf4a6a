"""Texts of any length in several languages and in code: the same for the same kind and seed, and never a loop.

Every text begins with a line of its own, so no two of them share a prefix that a cache could hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Draw = random.Random


def _english(r: Draw) -> str:
    who = r.choice(["The harbour master", "A retired surveyor", "My neighbour", "The night nurse", "An apprentice"])
    did = r.choice(["counted", "repaired", "photographed", "weighed", "catalogued", "repainted"])
    what = r.choice(["lanterns", "maps", "clocks", "bicycles", "letters", "instruments", "seed trays"])
    where = r.choice(["under the old bridge", "behind the mill", "in the north wing", "near the ferry", "at the depot"])
    why = r.choice(["because the river was rising", "before the inspectors came", "while the others slept",
                    "although nobody had asked", "since the roof had begun to leak"])  # fmt: skip
    return f"On day {r.randrange(1, 400)} {who[0].lower() + who[1:]} {did} {r.randrange(2, 90)} {what} {where}, {why}. "


def _chinese(r: Draw) -> str:
    who = r.choice(["老船长", "图书管理员", "邻居的孩子", "测量员", "值夜班的护士"])
    did = r.choice(["修好了", "清点了", "记录下", "重新粉刷了", "仔细检查了"])
    what = r.choice(["盏灯笼", "张地图", "座钟", "辆自行车", "封旧信"])
    where = r.choice(["在桥下", "在仓库后面", "在北边的房间里", "在渡口旁", "在山脚的车站"])
    why = r.choice(["因为河水正在上涨", "尽管没有人要求", "趁着天还没黑", "在检查人员到来之前"])
    return f"第{r.randrange(1, 400)}天，{who}{where}{did}{r.randrange(2, 90)}{what}，{why}。"


def _code(r: Draw) -> str:
    name = r.choice(["merge", "split", "scale", "rank", "pack", "trim"]) + "_" + r.choice(["rows", "edges", "pages"])
    a, b = r.choice([("left", "right"), ("first", "second"), ("old", "new")])
    number = r.randrange(2, 99)
    body = r.choice([
        f"    total = sum(x * {number} for x in {a})\n    return total - len({b})\n",
        f"    seen = set({a})\n    return [x for x in {b} if x not in seen][:{number}]\n",
        f"    for index, value in enumerate({a}):\n        if value % {number} == 0:\n            {b}[index] = value\n"
        f"    return {b}\n",
    ])  # fmt: skip
    return f'def {name}_{r.randrange(1000)}({a}: list[int], {b}: list[int]):\n    """Step {number}."""\n{body}\n\n'


def _spanish(r: Draw) -> str:
    who = r.choice(["El farero", "La bibliotecaria", "Mi vecina", "Un aprendiz", "La enfermera"])
    did = r.choice(["contó", "reparó", "pintó", "ordenó", "pesó"])
    what = r.choice(["faroles", "mapas", "relojes", "cartas", "barriles"])
    where = r.choice(["bajo el puente", "detrás del molino", "junto al muelle", "en la estación"])
    why = r.choice(
        ["porque subía el río", "aunque nadie lo pidió", "antes de la tormenta", "mientras los demás dormían"]
    )
    return (
        f"El día {r.randrange(1, 400)}, {who[0].lower() + who[1:]} {did} {r.randrange(2, 90)} {what} {where}, {why}. "
    )


def _records(r: Draw) -> str:
    unit = r.choice(["pump", "valve", "rotor", "sensor"])
    state = r.choice(["ok", "ok", "ok", "warn", "fault"])
    return (f'{{"time": "{r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02}", "unit": "{unit}-'
            f'{r.randrange(40)}", "pressure": {r.randrange(100, 999) / 10}, "state": "{state}"}}\n')  # fmt: skip


def _german(r: Draw) -> str:
    who = r.choice(["der Hafenmeister", "die Uhrmacherin", "mein Nachbar", "der Lehrling", "die Bibliothekarin"])
    did = r.choice(["zählte", "reparierte", "ordnete", "wog", "beschriftete"])
    what = r.choice(["Laternen", "Landkarten", "Uhren", "Briefe", "Fahrräder"])
    why = r.choice(["weil der Fluss stieg", "obwohl es niemand verlangte", "bevor der Regen kam"])
    return f"Am Tag {r.randrange(1, 400)} {did} {who} {r.randrange(2, 90)} {what}, {why}. "


def _japanese(r: Draw) -> str:
    who = r.choice(["灯台守", "図書館員", "隣の子ども", "見習い", "夜勤の看護師"])
    what = r.choice(["枚の地図", "個のランタン", "通の手紙", "台の時計", "台の自転車"])
    where = r.choice(["橋の下で", "倉庫の裏で", "北の部屋で", "港のそばで"])
    did = r.choice(["数えた", "直した", "並べた", "記録した"])
    return f"{r.randrange(1, 400)}日目、{who}は{where}{r.randrange(2, 90)}{what}を{did}。"


def _russian(r: Draw) -> str:
    who = r.choice(["смотритель маяка", "часовщик", "мой сосед", "ученик", "библиотекарь"])
    did = r.choice(["пересчитал", "починил", "разложил", "взвесил", "описал"])
    what = r.choice(["фонарей", "карт", "часов", "писем", "велосипедов"])
    why = r.choice(["потому что река поднималась", "хотя никто не просил", "пока остальные спали"])
    return f"На {r.randrange(1, 400)}-й день {who} {did} {r.randrange(5, 90)} {what}, {why}. "


KINDS: dict[str, Callable[[Draw], str]] = {
    "english": _english,
    "chinese": _chinese,
    "code": _code,
    "spanish": _spanish,
    "records": _records,
    "german": _german,
    "japanese": _japanese,
    "russian": _russian,
}

CHATS = {
    "english": "Explain in two sentences why ice floats on water, then give one example.",
    "chinese": "请用三句话介绍潮汐的成因，并举一个例子。",
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "spanish": "Escribe una lista corta de consejos para cuidar una bicicleta.",
    "records": 'Turn this into one sentence: {"unit": "pump-7", "pressure": 41.5, "state": "warn"}',
    "german": "Nenne drei Gründe, warum Brücken Dehnungsfugen haben.",
    "japanese": "富士山について短い詩を書いてください。",
    "russian": "Объясни простыми словами, что такое рычаг.",
}


def pieces(kind: str, seed: int) -> Iterator[str]:
    """A text without an end, sentence by sentence (statement by statement, record by record)."""
    draw = random.Random(f"k3dspark accept {kind} {seed}")
    yield f"# {kind} {seed}-{draw.randrange(10**9)}\n"
    while True:
        yield KINDS[kind](draw)


def text(kind: str, seed: int, characters: int) -> str:
    """At least so many characters."""
    parts, size = [], 0
    for piece in pieces(kind, seed):
        parts.append(piece)
        size += len(piece)
        if size >= characters:
            break
    return "".join(parts)
