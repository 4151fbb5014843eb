"""The switches: parsed, validated, merged; a setting given twice with different values names both places."""

from __future__ import annotations

import pytest

from dspark.contracts import DsparkError
from dspark.settings import SWITCHES, Settings, foreign_variables, show, variable


def test_defaults_are_the_designs() -> None:
    assert Settings.from_env({}).as_dict() == {
        "use_nextn_decode": 5,
        "dflash_confidence_head_temperature": [1.0],
        "enable_mtp_varlen": False,
        "max_backtracking_tokens": 6,
        "yoco_prefill_truncation_mode": "off",
        "yoco_prefill_keep_tokens": 0,
        "batch_invariant": False,
    }


def test_every_field_is_a_switch_and_reads_its_variable() -> None:
    texts = {
        "use_nextn_decode": ("7", 7),
        "dflash_confidence_head_temperature": ("1.5, 0.5", (1.5, 0.5)),
        "enable_mtp_varlen": ("1", True),
        "max_backtracking_tokens": ("9", 9),
        "yoco_prefill_truncation_mode": ("Compact", "compact"),
        "yoco_prefill_keep_tokens": ("140", 140),
        "batch_invariant": ("true", True),
    }
    assert texts.keys() == SWITCHES.keys()
    settings = Settings.from_env({variable(name): text for name, (text, _) in texts.items()})
    for name, (_, value) in texts.items():
        assert getattr(settings, name) == value
        assert variable(name) in settings.origins[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("USE_NEXTN_DECODE", "0"),
        ("USE_NEXTN_DECODE", "2.5"),
        ("USE_NEXTN_DECODE", "five"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,,2"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "nan"),
        ("ENABLE_MTP_VARLEN", "yes"),
        ("MAX_BACKTRACKING_TOKENS", "5"),
        ("MAX_BACKTRACKING_TOKENS", "0"),
        ("YOCO_PREFILL_TRUNCATION_MODE", "on"),
        ("YOCO_PREFILL_KEEP_TOKENS", "-1"),
        ("BATCH_INVARIANT", "2"),
    ],
)
def test_an_invalid_value_names_variable_and_value(name: str, text: str) -> None:
    with pytest.raises(DsparkError) as error:
        Settings.from_env({f"DEEPINFER_{name}": text})
    assert f"DEEPINFER_{name}" in str(error.value)
    assert repr(text) in str(error.value)


def test_backtracking_follows_the_block_unless_given() -> None:
    assert Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": "7"}).max_backtracking_tokens == 8
    assert Settings(use_nextn_decode=7).max_backtracking_tokens == 8
    assert Settings().merge({"use_nextn_decode": 9}).max_backtracking_tokens == 10
    assert Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": "2"}).max_backtracking_tokens == 6
    with pytest.raises(DsparkError, match=r"DEEPINFER_MAX_BACKTRACKING_TOKENS.*at least 8"):
        Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": "7", "DEEPINFER_MAX_BACKTRACKING_TOKENS": "6"})


def test_merge_takes_what_is_new_and_refuses_what_differs() -> None:
    settings = Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": "3"})
    merged = settings.merge({"use_nextn_decode": 3, "enable_mtp_varlen": True, "batch_invariant": None}, "recipe.yaml")
    assert (merged.use_nextn_decode, merged.enable_mtp_varlen, merged.batch_invariant) == (3, True, False)
    with pytest.raises(DsparkError) as error:
        settings.merge({"use_nextn_decode": 4}, "recipe.yaml")
    for part in ("3", "DEEPINFER_USE_NEXTN_DECODE in the environment", "4", "use_nextn_decode in recipe.yaml"):
        assert part in str(error.value)
    with pytest.raises(DsparkError, match=r"first\.yaml.*second\.yaml"):
        Settings().merge({"batch_invariant": True}, "first.yaml").merge({"batch_invariant": False}, "second.yaml")


def test_merge_refuses_unknown_names_and_bad_values() -> None:
    with pytest.raises(DsparkError, match="Did you mean enable_mtp_varlen"):
        Settings().merge({"enable_mtp_varlens": True})
    with pytest.raises(DsparkError, match=r"use_nextn_decode in r\.yaml: expected an integer"):
        Settings().merge({"use_nextn_decode": True}, "r.yaml")
    assert Settings().merge({"yoco_prefill_truncation_mode": False}).yoco_prefill_truncation_mode == "off"


def test_other_variables_are_listed_and_near_misses_refused() -> None:
    assert foreign_variables({"DEEPINFER_PORT": "1", "DEEPINFER_BATCH_INVARIANT": "1"}) == ["DEEPINFER_PORT"]
    assert Settings.from_env({"DEEPINFER_PORT": "1", "DEEPINFER_BATCH_INVARIANT": ""}) == Settings()
    with pytest.raises(DsparkError, match="expected DEEPINFER_ENABLE_MTP_VARLEN, but got DEEPINFER_ENABLE_MTP_VARLENS"):
        Settings.from_env({"DEEPINFER_ENABLE_MTP_VARLENS": "1"})


def test_a_shown_value_reads_back() -> None:
    for value in (True, (1.0, 0.5), 7, "mask"):
        assert show(value) == {True: "1", (1.0, 0.5): "1.0,0.5", 7: "7", "mask": "mask"}[value]


def test_settings_that_contradict_each_other_are_one_error() -> None:
    both = {"DEEPINFER_USE_NEXTN_DECODE": "7", "DEEPINFER_MAX_BACKTRACKING_TOKENS": "6"}
    cut = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
    assert Settings.from_env(cut).yoco_prefill_keep_tokens == 140
    with pytest.raises(DsparkError) as error:
        Settings.from_env({**both, "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"})
    assert str(error.value).count("expected") == 2
    assert "MAX_BACKTRACKING_TOKENS" in str(error.value)
    assert "KEEP_TOKENS in the environment: expected yoco_prefill_truncation_mode compact or mask" in str(error.value)
    for keep in ({}, {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "6"}):
        with pytest.raises(DsparkError, match="more than max_backtracking_tokens"):
            Settings.from_env({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask", **keep})
    with pytest.raises(DsparkError, match=r"TRUNCATION_MODE in the environment and off from .* in the recipe"):
        Settings.from_env(cut).merge({"yoco_prefill_truncation_mode": "off"}, "the recipe")
