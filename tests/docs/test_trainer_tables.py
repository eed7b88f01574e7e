"""The tables of docs/trainer.md name every option there is, none that is not, and the defaults that they have."""

import argparse
import re
from pathlib import Path

import pytest
import yaml

from torchacc.cli import train_command
from torchacc.config import Section
from torchacc.train.config import StageConfig, TopConfig

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = ("data", "optimizer", "scheduler", "training", "distributed")


def options_of(section, path=""):
    """Return the default of each option of a section and of those below it, by its dotted name."""
    found = {}
    for name, field in section.model_fields.items():
        full, kind = f"{path}{field.alias or name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= options_of(kind, f"{full}.")
        else:
            found[full] = field.get_default(call_default_factory=True)
    return found


def rows(heading):
    """Return the options that each row of the table under a heading names, and the cell with the default."""
    table = re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)[1]
    lines = [line.split(" | ") for line in re.sub(r"\| \|", "|  |", table).splitlines() if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", line[0]), line[-2].strip()) for line in lines]


STAGE = options_of(StageConfig)
TABLES = {
    "Top level": ({**options_of(TopConfig), "model_config_": None}, ""),
    "A stage": ({name: value for name, value in STAGE.items() if "." not in name} | dict.fromkeys(SECTIONS), ""),
    "`data`": (STAGE, "data."),
    "`optimizer`, `scheduler`": ({**STAGE, "optimizer.…": None}, ("optimizer.", "scheduler.")),
    "`training`": (STAGE, "training."),
    "`distributed`": (STAGE, "distributed."),
}


@pytest.mark.parametrize("heading", TABLES)
def test_a_table_names_the_options_of_its_sections_and_their_defaults(heading):
    options, prefix = TABLES[heading]
    above = prefix if isinstance(prefix, str) else ""
    listed = {}
    for names, default in rows(heading):
        section = names[0].partition(".")[0]
        for name in names:
            full = f"{section}{name}" if name.startswith(".") else f"{above}{name}"
            listed[re.sub(r"\.?<name>$", "", full)] = default if len(names) == 1 else ""
    assert listed.keys() == {name for name in options if name.startswith(prefix)}
    plain = {name: re.fullmatch("`([^`]+)`", default) for name, default in listed.items()}
    shown = {name: yaml.safe_load(found[1]) for name, found in plain.items() if found}
    assert shown == {name: options[name] for name in shown}


def test_the_table_of_the_command_names_its_options():
    parser = argparse.ArgumentParser(add_help=False)
    train_command.add_options(parser)
    several = {"--node-rank", "--master-addr", "--master-port"}  # named under "Several machines"
    assert several <= set(re.findall("`(--[a-z-]+)`", TEXT))
    listed = {name.split()[0] for names, _ in rows("The trainer") for name in names if name.startswith("--")}
    assert listed | several | {"--dry-run"} == {
        option for action in parser._actions for option in action.option_strings
    }
