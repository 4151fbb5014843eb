"""Measuring on tiny models, and the report's text, picture and verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dspark.calibration.figures import png
from dspark.contracts import DsparkError
from dspark.corpus.prompts import Prompt
from dspark.runner import Engine, EngineOptions
from dspark.runner.acceptance import Counts, by_domain
from dspark.scorecard.measure import Conversation, Outcome, RunOptions, differing, drafted, measure
from dspark.scorecard.pictures import slots_figure
from dspark.scorecard.report import build_report, load_report, refuse_difference
from dspark.scorecard.setting import Setting, requests_for
from dspark.scorecard.text import report_text

SETTINGS = (Setting("coupled", 0.9), Setting("greedy", 0.0), Setting("rejection", 0.9))
RUN = RunOptions(max_tokens=11)
COUNTS = Counts(4, 7, 3, (4, 3, 2), (3, 2, 1))


def prompts(count: int = 8) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    ids = [tuple(torch.randint(0, 13, (3 + i % 4,), generator=generator).tolist()) for i in range(count)]
    return [Prompt(f"{i:016x}", ("math", "code")[i % 2], (), one) for i, one in enumerate(ids)]


@pytest.fixture(scope="module")
def pair(models: ModuleType) -> tuple[Any, Any]:
    target = models.make_target(torch.float32)
    return target, models.make_drafter(target)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.verifier)
def test_measuring_is_the_runner_and_acceptance(pair: tuple[Any, Any], setting: Setting) -> None:
    target, drafter = pair
    got = measure(target, drafter, prompts(), setting, RUN)
    requests = requests_for(prompts(), setting, target.eos_ids, RUN.max_tokens, RUN.run_seed)
    done = Engine(target, drafter, EngineOptions(setting.verifier)).generate(requests)
    wanted = by_domain([drafted(*one) for one in zip(prompts(), requests, done, strict=True)], 4)
    assert min(got.drafted, got.accepted, got.rejected) > 0, "inconclusive"
    assert got.tokens == sum(len(c.token_ids) for c in done)
    assert got.verdict == ("equal" if setting.equals_plain else "not compared")
    report = as_report([got], pair)
    found = report["settings"][0]["figures"]
    assert list(found) == list(wanted)
    for domain, one in wanted.items():
        assert (found[domain]["tau"]["value"], found[domain]["accepted"]["value"]) == (one.tau, one.accepted)
        assert tuple(e["value"] for e in found[domain]["conditional"]) == one.per_slot


def as_report(outcomes: list[Outcome], pair: tuple[Any, Any]) -> dict[str, Any]:
    target, drafter = pair
    return build_report(
        outcomes, target=target, drafter=drafter, prompts=prompts(), run=RUN, prompt_facts={"source": "test.jsonl"},
        drafter_facts={"checkpoint": "last.ckpt"},
    )  # fmt: skip


def test_the_batch_changes_no_figure_and_the_seed_does(pair: tuple[Any, Any]) -> None:
    for setting in SETTINGS:
        whole = measure(*pair, prompts(), setting, RUN)
        assert measure(*pair, prompts(), setting, replace(RUN, batch_size=3)) == whole
        again = measure(*pair, prompts(), setting, replace(RUN, run_seed=1))
        assert (again == whole) == (setting.verifier == "greedy")


def test_a_report_reads_back_and_says_what_it_is_of(pair: tuple[Any, Any], tmp_path: Path) -> None:
    outcomes = [measure(*pair, prompts(), setting, RUN) for setting in SETTINGS]
    report = as_report(outcomes, pair)
    (tmp_path / "drafter_report.json").write_text(json.dumps(report, allow_nan=False))
    assert load_report(tmp_path) == load_report(tmp_path / "drafter_report.json") == report
    assert report == as_report(outcomes, pair)
    assert report["target"]["fingerprint"] == pair[0].fingerprint
    assert report["target"]["dtype"] == "float32"
    assert report["prompts"]["count"] == 8
    assert report["machine"]["kernels"]
    assert png(slots_figure(report)) == png(slots_figure(report))
    with pytest.raises(DsparkError, match="drafter report"):
        load_report(tmp_path / "nowhere.json")


def test_one_bit_of_one_sequence_is_a_difference(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    requests = requests_for(prompts(), SETTINGS[0], target.eos_ids, 11, 0)
    done = Engine(target, drafter).generate(requests)
    bent = list(done)
    after = float(torch.nextafter(torch.tensor(done[3].logprobs[2]), torch.tensor(-9.0)))
    bent[3] = replace(done[3], logprobs=(*done[3].logprobs[:2], after, *done[3].logprobs[3:]))
    assert (differing(done, done), differing(done, bent)) == (0, 1)
    bent[0] = replace(done[0], finish_reason="stop" if done[0].finish_reason == "length" else "length")
    assert differing(done, bent) == 2


def outcome(**changes: Any) -> Outcome:
    settled = {"tokens": 9, "drafted": 9, "accepted": 3, "rejected": 2, "differing": 0}
    return Outcome(SETTINGS[0], (Conversation("x", "math", COUNTS),), **{**settled, **changes})


def test_verdicts() -> None:
    assert outcome().verdict == "equal"
    assert outcome(differing=1).verdict == "different"
    assert outcome(differing=None).verdict == "not compared"
    assert all(outcome(**{name: 0}).verdict == "inconclusive" for name in ("drafted", "accepted", "rejected"))
    assert outcome(accepted=0, differing=1).verdict == "different"


def test_a_difference_ends_in_an_error_and_shows(make_report: Callable[..., Any]) -> None:
    some = [Conversation(f"p{i}", "math", COUNTS) for i in range(4)]
    refuse_difference(make_report(dict.fromkeys(SETTINGS, some)))
    report = make_report({SETTINGS[0]: some}, differing=1)
    assert "1 of 4 sequences DIFFER" in report_text(report)
    with pytest.raises(DsparkError, match="1 of 4"):
        refuse_difference(report)
    assert "inconclusive" in report_text(make_report({SETTINGS[0]: some}, rejected=0))


@pytest.mark.parametrize("slots", [1, 7, 16])
def test_every_table_fits_and_names_both_lengths(make_report: Callable[..., Any], slots: int) -> None:
    counts = [Counts(1000, 1700 + i, 700 + i, (999,) * slots, (999 - i,) * slots) for i in range(4)]
    some = [Conversation(f"p{i}", ("math", "a domain with a long name")[i % 2], c) for i, c in enumerate(counts)]
    report = make_report(dict.fromkeys(SETTINGS, some))
    report["prompts"]["source"] = "a/very/long/path" * 9
    text = report_text(report)
    assert max(map(len, text.splitlines())) <= 80
    for part in text.split("-" * 78)[1:]:
        assert "tau (own included)" in part
        assert "drafts (own excluded)" in part
        assert sum(line.startswith("slot") for line in part.splitlines()) == -(-slots // 9)
    assert text.count("0 of 4 sequences differ") == 2
    assert text.count("not compared") == 1


def test_a_setting_that_cannot_be_is_refused() -> None:
    for bad in (("greedy", 0.5), ("magic", 1.0), ("coupled", -1.0), ("coupled", 1.0, 0.0)):
        with pytest.raises(DsparkError, match="expected"):
            Setting(*bad)  # type: ignore[arg-type]


def kinds_of_damage(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a report, two entries of each list."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from kinds_of_damage(one, (*path, key))


def test_whatever_is_changed_in_a_report_is_one_error(make_report: Callable[..., Any], tmp_path: Path) -> None:
    good = make_report({SETTINGS[0]: [Conversation(f"p{i}", "math", COUNTS) for i in range(3)]})
    file, text = tmp_path / "drafter_report.json", json.dumps(good)
    file.write_text(text)
    assert load_report(tmp_path) == good
    paths = list(kinds_of_damage(good))
    assert len(paths) > 80
    for path in paths:
        for bad in (None, [], "x", -5):
            report = json.loads(text)
            place = report
            for key in path[:-1]:
                place = place[key]
            if place[path[-1]] == bad:
                continue
            place[path[-1]] = bad
            file.write_text(json.dumps(report))
            with pytest.raises(DsparkError, match=r"edited or damaged.*Test|expected a drafter report of schema"):
                load_report(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", '"\\ud800"', "1e999"])
def test_what_json_should_not_hold_is_damage(make_report: Callable[..., Any], tmp_path: Path, number: str) -> None:
    text = json.dumps(make_report({SETTINGS[0]: [Conversation("p", "math", COUNTS)]}))
    (tmp_path / "drafter_report.json").write_text(text.replace('"max_tokens": 8', f'"max_tokens": {number}'))
    with pytest.raises(DsparkError, match="edited or damaged"):
        load_report(tmp_path)


def test_a_report_without_a_hash_is_tested_again(make_report: Callable[..., Any], tmp_path: Path) -> None:
    report = make_report({SETTINGS[0]: [Conversation("p", "math", COUNTS)]})
    del report["content"]
    (tmp_path / "drafter_report.json").write_text(json.dumps(report))
    with pytest.raises(DsparkError, match=r"it has none.*Test the draft model again"):
        load_report(tmp_path)
