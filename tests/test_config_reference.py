"""The list of settings is that of the dataclasses: nothing is missing, and what is shown can be typed."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from omegaconf import OmegaConf

from fsdp_async.config import Config
from fsdp_async.config_reference import sections, written
from fsdp_async.correction_config import Bounds, Rejection

CONFIG = asdict(Config())


def _keys():
    return {f"{path}.{key.name}": key for section in sections() for path in section.paths for key in section.keys}


def test_every_key_of_a_config_is_listed_with_the_default_that_it_has():
    shown = {path: OmegaConf.create(f"value: {key.default}").value for path, key in _keys().items()}
    for section, values in CONFIG.items():
        for name, value in values.items():
            assert shown[f"{section}.{name}"] == (list(value) if isinstance(value, tuple) else value)


def test_the_parts_of_a_section_are_listed_at_every_place_where_they_may_stand():
    nested = {path for path in _keys() if path.count(".") == 2}
    bounds = {f"correction.{factor}.{f.name}" for factor in ("combined", "mismatch", "lag") for f in fields(Bounds)}
    assert nested == bounds | {f"correction.rejections[i].{f.name}" for f in fields(Rejection)}


def test_values_are_named_in_words_and_choices_apart():
    keys = _keys()
    assert keys["trainer.anchor"].choices[:2] == ("behaviour", "last_sync")
    assert keys["optim.lr"].choices == ()
    words = {path: keys[path].values for path in ("optim.lr", "run.resume", "rollout.partial", "task.dataset")}
    assert words == {
        "optim.lr": "a number",
        "run.resume": "a text or null",
        "rollout.partial": "true, false or null",
        "task.dataset": "a mapping or null",
    }
    assert keys["correction.rejections"].values == "a list of `Rejection`"


def test_what_a_docstring_says_of_a_key_goes_to_that_key_alone():
    section = next(section for section in sections() if section.name == "Bounds")
    upper = next(key for key in section.keys if key.name == "upper")
    assert upper.meaning.startswith("ratios, 0 <= lower <= upper; None for no bound. Without any")
    assert section.text == "How the weight of one factor is formed and bounded."


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-8, 0.5, "auto", ["a", 1.5, None], {"size": 2000, "deep": {"flag": False}}]
)
def test_what_is_written_is_read_back(value):
    assert OmegaConf.to_container(OmegaConf.create(f"value: {written(value)}"))["value"] == value
