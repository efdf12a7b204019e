"""KEY=VALUE settings."""

import pytest

from fedmjp.errors import ConfigError
from fedmjp.overrides import apply_settings


def test_settings_go_into_nested_values_and_leave_the_given_ones_alone() -> None:
    values = {"recipe": {"epochs": 1}, "seed": 0}
    settings = ["recipe.epochs=20", "model.name=deit_micro", "uploads=[1, 2]", "recipe.compile=true", "name="]
    found = apply_settings(values, settings)
    assert found == {
        "recipe": {"epochs": 20, "compile": True},
        "seed": 0,
        "model": {"name": "deit_micro"},
        "uploads": [1, 2],
        "name": "",
    }
    assert values == {"recipe": {"epochs": 1}, "seed": 0}


def test_settings_reach_into_lists_and_into_one_of_two_that_are_the_same() -> None:
    shared = [1, {"x": 2}]
    assert apply_settings({"a": shared, "b": shared}, ["a.1.x=3", "a.0=[]"]) == {
        "a": [[], {"x": 3}],
        "b": [1, {"x": 2}],
    }


@pytest.mark.parametrize("setting", ["epochs", "=3", "seed.x=1", "recipe.epochs=[1", "list.1=0", "list.x=0"])
def test_what_is_no_setting_is_told(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"KEY=VALUE|no group of keys|no number"):
        apply_settings({"seed": 0, "list": [1]}, [setting])
