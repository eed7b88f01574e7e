"""Refuse options that are not available beside one that splits a model, or its batch."""

from collections.abc import Mapping

from torchacc.errors import ConfigError


def refuse_beside(asked: str, others: Mapping[str, bool]) -> None:
    """Refuse the first of the options that a config asks for beside another.

    Args:
        asked: The other one, with its value.
        others: Options with their values, and whether the config asks for each.

    Raises:
        ConfigError: It asks for one of them.
    """
    for option, is_asked in others.items():
        if is_asked:
            raise ConfigError(f"{asked} with {option} is not available yet: leave one of them at its default")
