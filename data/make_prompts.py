"""Write data/prompts/{train,calibration,test,extra}.jsonl from data/templates/*.toml. Same templates, same bytes.

    python data/make_prompts.py [--out DIR]

A template file is a domain, a ``[[kind]]`` in it is a kind of question with eight variants: variant j takes value j of
each of the kind's lists. Five variants go to train, one to calibration, two to test, so every split asks every kind of
question and no two splits share content. No random numbers: places rotate with the kind's index.
A fourth file, extra, is for longer training: the train variants' values recombined, up to 40 prompts a kind, in the
order of a hash.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.files import atomic_write

HERE = Path(__file__).parent
DOMAINS = ("math", "code", "chat")
PLACES = ("train",) * 5 + ("calibration",) + ("test",) * 2
FIXED_KEYS = {"name", "say", "answer", "then", "system"}
EXTRA_PER_KIND = 40

Row = dict[str, Any]


def make_rows(templates: Path = HERE / "templates") -> list[Row]:
    """All prompts, in order of domain, kind and variant. Raises DsparkError on a template that cannot be filled."""
    rows = [
        row
        for domain in DOMAINS
        for index, kind in enumerate(tomllib.loads((templates / f"{domain}.toml").read_text(encoding="utf-8"))["kind"])
        for row in _variants(domain, index, kind)
    ]
    seen: dict[str, str] = {}
    for row in rows:
        first = seen.setdefault(json.dumps(row["messages"]), row["id"])
        if first != row["id"]:
            raise DsparkError(f"data: expected every prompt to differ, but {row['id']} repeats {first}.")
    return rows


def make_extra(known: list[Row], templates: Path = HERE / "templates") -> list[Row]:
    """The train variants' slot values in every other combination and wording: rows that repeat none of ``known``."""
    seen, rows = {_question(row) for row in known}, []
    for domain in DOMAINS:
        kinds = tomllib.loads((templates / f"{domain}.toml").read_text(encoding="utf-8"))["kind"]
        for index, kind in enumerate(kinds):
            fresh = {_question(row): row for row in _combinations(domain, index, kind)}
            unseen = [row for question, row in fresh.items() if question not in seen]
            rows += sorted(unseen, key=lambda row: _hash(row["id"]))[:EXTRA_PER_KIND]
    return rows


def _question(row: Row) -> str:
    """What makes two prompts the same question: the first user turn."""
    return next(message["content"] for message in row["messages"] if message["role"] == "user")


def _combinations(domain: str, index: int, kind: dict[str, Any]) -> Iterator[Row]:
    slots = {key: values for key, values in kind.items() if key not in FIXED_KEYS}
    mine = [variant for variant in range(len(PLACES)) if PLACES[(variant + index) % len(PLACES)] == "train"]
    for chosen in itertools.product(mine, repeat=len(slots)):
        fill = {key: values[variant] for (key, values), variant in zip(slots.items(), chosen, strict=True)}
        for wording, say in enumerate(kind["say"]):
            name = f"{domain}-{kind['name']}-{''.join(map(str, chosen))}-{wording}"
            messages = _turns(kind, fill, say, _hash(name) % 2 == 0, _hash(name) // 2)
            yield {"id": name, "domain": domain, "split": "extra", "kind": kind["name"], "messages": messages}


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode("utf-8")).hexdigest(), 16)


def _variants(domain: str, index: int, kind: dict[str, Any]) -> Iterator[Row]:
    slots = {key: values for key, values in kind.items() if key not in FIXED_KEYS}
    for key, values in slots.items():
        if len(values) != len(PLACES):
            raise DsparkError(
                f"data: expected {len(PLACES)} values in {domain}/{kind['name']}.{key}, but got {len(values)}."
            )
    for variant in range(len(PLACES)):
        fill = {key: values[variant] for key, values in slots.items()}
        yield {
            "id": f"{domain}-{kind['name']}-{variant}",
            "domain": domain,
            "split": PLACES[(variant + index) % len(PLACES)],
            "kind": kind["name"],
            "messages": _messages(kind, fill, index, variant),
        }


def _messages(kind: dict[str, Any], fill: dict[str, Any], index: int, variant: int) -> list[dict[str, str]]:
    """The variant's turns. The divisors differ so that wording, system turn and split vary independently."""
    say = kind["say"][(variant + index // 2) % len(kind["say"])]
    return _turns(kind, fill, say, (variant + index // 3) % 2 == 0, (variant + index) // 2)


def _turns(kind: dict[str, Any], fill: dict[str, str], say: str, system: bool, follow: int) -> list[dict[str, str]]:
    turns = [("user", say)]
    if "system" in kind and system:
        turns.insert(0, ("system", kind["system"]))
    if "then" in kind:
        turns += [("assistant", kind["answer"]), ("user", kind["then"][follow % len(kind["then"])])]
    return [{"role": role, "content": text.format(**fill)} for role, text in turns]


def mixed(rows: list[Row]) -> list[Row]:
    """The same rows so ordered that the first N hold every domain, and every kind, about equally often."""
    turn: dict[tuple[str, str], int] = {}
    place: dict[tuple[str, str], int] = {}
    keyed = []
    for row in rows:
        group = (row["domain"], row["kind"])
        place.setdefault(group, sum(domain == row["domain"] for domain, _ in place))
        keyed.append((turn.get(group, 0), place[group], DOMAINS.index(row["domain"]), row))
        turn[group] = turn.get(group, 0) + 1
    return [row for *_, row in sorted(keyed, key=lambda entry: entry[:3])]


def write_prompts(out: Path) -> dict[str, int]:
    """Write one JSONL file a split into ``out``; returns the number of prompts of each."""
    rows, counts = make_rows(), {}
    rows += make_extra(rows)
    for split in (*dict.fromkeys(PLACES), "extra"):
        chosen = mixed([row for row in rows if row["split"] == split])
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
        atomic_write(out / f"{split}.jsonl", "".join(lines))
        counts[split] = len(chosen)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "prompts", help="where the files go")
    for split, count in write_prompts(parser.parse_args().out).items():
        print(f"{split}: {count} prompts")


if __name__ == "__main__":
    main()
