"""Names that may be a folder's or the Hugging Face hub's, and whether the hub answers.

It is asked once, where its libraries would try again for most of a minute.
"""

from pathlib import Path

from torchacc.errors import ConfigError, shown

_LOADED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def is_path(name: str) -> bool:
    """Return whether a name can be a path alone: names on the hub have one slash at most, and no dot before it."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def is_on_hub(name: str) -> bool:
    """Return whether a name can only be one on the hub."""
    return not is_path(name) and not Path(name).is_dir()


def check_hub(option: str, name: str) -> None:
    """Refuse a name on the hub where that does not answer; with HF_HUB_OFFLINE=1 its cache is used, and nothing asked.

    Args:
        option: What was given the name, for the message.
        name: The name.

    Raises:
        ConfigError: The hub does not answer within its own libraries' limit, HF_HUB_ETAG_TIMEOUT.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the library for HTTP, which differs from version to version
        raise ConfigError(
            f"{option} = {shown(name)}: there is no such folder, and the Hugging Face hub does not answer at "
            f"{constants.ENDPOINT} ({str(error) or type(error).__name__}): name a folder, or set HF_HUB_OFFLINE=1 to "
            "use what was downloaded before"
        ) from None


def local_folder(source: str) -> Path:
    """Return the folder of a checkpoint that is named by its folder or by its name on the hub, which is downloaded.

    Raises:
        ConfigError: It is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=_LOADED_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{shown(source)} is not a folder, and cannot be had from the Hugging Face hub: {error}"
        ) from None
