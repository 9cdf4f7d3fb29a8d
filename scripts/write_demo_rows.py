"""Write the rows that `make demo` trains on: the desk of a made-up boatyard.

    python scripts/write_demo_rows.py

Eight kinds of question with answers in one house style, from one line to a page, so that padding shows. All of it is
made here from the words below, so there is no source but this file; the rows are under the licence of the project.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["build_rows"]

FOLDER = Path(__file__).parents[1] / "demo"
NUM_TRAIN, NUM_HELD_OUT = 280, 40

BOATS = ["Heron", "Tern", "Osprey", "Petrel", "Curlew", "Plover", "Gannet", "Avocet", "Dunlin", "Merganser"]
PEOPLE = ["Maya", "Jonas", "Ife", "Pavel", "Lucia", "Tomas", "Noor", "Greta", "Samir", "Anneke"]
CLUBS = ["the rowing club", "the ferry office", "the sea school", "the lifeboat crew", "the harbour museum"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
# part -> (locker, fault, steps of the work)
PARTS = {
    "bilge pump": ("A2", "does not start", ["Switch off the main breaker.", "Free the float and clear the strainer.",
        "Check the hose for kinks.", "Run the pump dry for ten seconds, then with a bucket of water."]),
    "rudder": ("C1", "is stiff", ["Chock the boat and support the blade.", "Drop the lower bearing.",
        "Scrape off growth and old grease.", "Grease both bearings and swing the blade from stop to stop."]),
    "anchor winch": ("B4", "slips under load", ["Secure the anchor with a line.",
        "Open the clutch and clean the cones.", "Replace glazed cones.", "Close it and lift the anchor twice."]),
    "compass": ("D3", "reads ten degrees off", ["Take phones and tools out of the cockpit.",
        "Swing the boat through eight headings.", "Turn the correctors until the error is below two degrees.",
        "Write the new deviation card."]),
    "fuel filter": ("A5", "is clogged", ["Close the fuel cock.", "Put a tray under the bowl and open it.",
        "Change the element and the seal.", "Open the cock, bleed the line and look for drops."]),
    "mast light": ("D1", "flickers", ["Lower the mast or rig the bosun's chair.", "Clean both contacts.",
        "Change the bulb and the gasket.", "Tape the cable where it leaves the mast."]),
    "shaft seal": ("B2", "drips", ["Lift the boat out.", "Slide back the coupling.",
        "Press in the new seal with its lip forward.", "Launch, and count the drops for five minutes."]),
    "tiller": ("C3", "is cracked", ["Take the tiller off and dry it for a day.", "Open the crack and run in epoxy.",
        "Clamp it over night.", "Sand, varnish twice, and fit it again."]),
}  # fmt: skip
RATES = [36, 42, 48, 54]


def _record(draw: random.Random) -> tuple[str, str]:
    boat, person, club, day = draw.choice(BOATS), draw.choice(PEOPLE), draw.choice(CLUBS), draw.choice(DAYS)
    part = draw.choice(list(PARTS))
    fault = PARTS[part][1]
    note = draw.choice([
        f"{person} from {club} rang. The {part} of the {boat} {fault}. Wanted back by {day}.",
        f"{boat}: {part} {fault}, says {person} ({club}). Needs it on {day}.",
        f"By {day} please! The {part} on the {boat} {fault}. It was {person} of {club} who asked.",
    ])  # fmt: skip
    answer = f"boat: {boat} | part: {part} | fault: {fault} | client: {person}, {club} | due: {day}"
    return f"Write this note as a record.\n\n{note}", answer


def _locker(draw: random.Random) -> tuple[str, str]:
    part = draw.choice(list(PARTS))
    question = draw.choice([
        "Which locker holds spares for the {}?", "Where do we keep parts of the {}?", "Locker for the {}?",
        "I need a spare for the {}. Which locker?", "Where are the {} spares?", "Spares, {}: which locker is it?",
    ])  # fmt: skip
    return question.format(part), f"Locker {PARTS[part][0]}."


def _minutes(draw: random.Random) -> tuple[str, str]:
    start, length = 15 * draw.randrange(32, 60), 5 * draw.randrange(1, 20)
    times = [f"{minute // 60:02}:{minute % 60:02}" for minute in (start, start + length)]
    return f"{draw.choice(BOATS)} in at {times[0]}, out at {times[1]}. Minutes?", f"{length} minutes."


def _bill(draw: random.Random) -> tuple[str, str]:
    hours, rate, price = draw.randrange(2, 9), draw.choice(RATES), 5 * draw.randrange(2, 30)
    part = draw.choice(list(PARTS))
    question = f"{hours} hours of work on the {part} at {rate} crowns an hour, and parts for {price} crowns. The bill?"
    work = hours * rate
    return question, f"{hours} x {rate} = {work}; {work} + {price} = {work + price}. The bill is {work + price} crowns."


def _reply(draw: random.Random) -> tuple[str, str]:
    boat, person, part, day = draw.choice(BOATS), draw.choice(PEOPLE), draw.choice(list(PARTS)), draw.choice(DAYS)
    state, told = draw.choice([
        ("it is finished", "is finished and has been tried on the water"),
        ("we wait for a part", f"waits for a part that comes on {day}"),
        ("nobody has looked at it yet", f"is next in line, and we look at it on {day}"),
    ])  # fmt: skip
    question = (
        f"{person} asks how the {part} of the {boat} is coming along. In truth {state} (day: {day}). Write the reply."
    )
    answer = (
        f"Dear {person}, thank you for asking. The {part} of the {boat} {told}. "
        "We write again as soon as that changes. Fair winds, the boatyard desk."
    )
    return question, answer


def _steps(draw: random.Random) -> tuple[str, str]:
    part = draw.choice(list(PARTS))
    boat = draw.choice(BOATS)
    question = draw.choice([
        f"List the steps for the {part} of the {boat}.",
        f"A new hand works on the {part} of the {boat} today. What are the steps?",
    ])  # fmt: skip
    steps = [*PARTS[part][2], f"Sign the card of the {boat}."]
    return question, "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def _day(draw: random.Random) -> tuple[str, str]:
    boats = draw.sample(BOATS, draw.randrange(4, 11))
    done = set(draw.sample(boats, draw.randrange(1, len(boats))))
    lines, minute = [], 8 * 60
    waiting = []
    for boat in boats:
        part = draw.choice(list(PARTS))
        minute += draw.randrange(5, 40)
        lines.append(f"{minute // 60:02}:{minute % 60:02} {boat} in, {part} {PARTS[part][1]}")
        minute += draw.randrange(5, 40)
        if boat in done:
            lines.append(
                f"{minute // 60:02}:{minute % 60:02} {boat} out, {part} done, card signed by {draw.choice(PEOPLE)}"
            )
        else:
            waiting.append(f"{boat} ({part})")
    answer = f"In: {len(boats)}. Out: {len(done)}. Waiting: {', '.join(waiting)}."
    return "Sum up the day from the yard's log.\n\n" + "\n".join(lines), answer


def _berth(draw: random.Random) -> tuple[str, str]:
    boats = draw.sample(BOATS, draw.randrange(5, 11))
    rows = {
        boat: (f"{draw.choice('NESW')}{draw.randrange(1, 30)}", draw.choice(PEOPLE), draw.choice(DAYS))
        for boat in boats
    }
    table = "\n".join(f"{boat} | {berth} | {person} | {day}" for boat, (berth, person, day) in rows.items())
    boat = draw.choice(boats)
    berth, person, day = rows[boat]
    question = f"boat | berth | skipper | leaves\n{table}\n\nWhere does the {boat} lie, and who takes her out when?"
    return question, f"The {boat} lies at {berth}; {person} takes her out on {day}."


# kind -> its share of the rows, in percent
KINDS: dict[Callable[[random.Random], tuple[str, str]], int] = {
    _record: 15, _locker: 16, _minutes: 32, _bill: 16, _reply: 6, _steps: 5, _day: 6, _berth: 4,
}  # fmt: skip


def build_rows(*, seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows to train on and the rows held out; no row is in both, and none is there twice."""
    draw = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < NUM_TRAIN + NUM_HELD_OUT:
        kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
        question, answer = kind(draw)
        rows.setdefault(question, answer)
    listed = [{"input": question, "output": answer} for question, answer in rows.items()]
    draw.shuffle(listed)
    return listed[:NUM_TRAIN], listed[NUM_TRAIN:]


def main(argv: list[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: demo")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train.jsonl", "held_out.jsonl"), build_rows(), strict=True):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(lines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
