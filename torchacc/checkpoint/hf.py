"""A checkpoint's tensors as transformers converts them for a model of its own, and what makes a folder one of its.

transformers 5 has some models in memory in another form than in files: tensors are renamed, those of experts stacked,
fused ones cut up. What becomes of what is asked of transformers itself, as `from_pretrained()` does it; here it is
done for one tensor at a time.
"""

import copy
import functools
import importlib.metadata
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from packaging.specifiers import SpecifierSet
from torch import nn

from torchacc.checkpoint.model_tensors import FoundTensors, ModelTensors, one_of
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder, StoredTensor
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import CheckpointError, listed
from torchacc.logging import get_logger

_log = get_logger(__name__)

_CONVERSIONS = SpecifierSet(">=5,<6")
"""Versions of transformers whose conversions may be the ones known here: those of 5.23, by name and by signature."""
_RENAME_ARGUMENTS = ["source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"]
_FORMER_BUFFERS = re.compile(r"(^|\.)attn\.masked_bias$")
"""What transformers 4 saved with GPT-2 and its like: a constant, which 5 does not list for all that had it."""

_skeletons: WeakKeyDictionary[ShardedModel, nn.Module] = WeakKeyDictionary()


class UnknownConversionError(Exception):
    """How transformers converts this model's checkpoints is not known."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether transformers defines a model's class, or one that it is derived from."""
    bases = type(model).__mro__
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in bases)


def convert(sharded: ShardedModel, wanted: ModelTensors, folder: CheckpointFolder) -> FoundTensors:
    """Return what transformers makes of a folder for one of its models.

    Raises:
        CheckpointError: The folder is quantized, or holds a tensor and what it is made of.
        UnknownConversionError: What transformers would do cannot be asked.
    """
    conversions = _Conversions(_skeleton(sharded))
    if folder.has("config.json") and folder.read_json("config.json").get("quantization_config"):
        raise CheckpointError(
            f"{folder.path} is quantized: open it with from_pretrained(), dequantize it, and save it again"
        )
    known = wanted.known
    mapping = conversions.map_keys(folder.model, known)
    copies: dict[str, list[StoredTensor]] = {}
    unexpected = list(mapping.unexpected)
    for name, key in mapping.renamed.items():
        copies.setdefault(known[name], []).append(folder.model[key])
    converter = _Converter(folder)
    for conversion in mapping.conversions:
        for name, made in conversion.run(converter.describe).items():
            if name in known:
                copies.setdefault(known[name], []).append(converter.stored(conversion, name, tuple(made.shape)))
            else:
                unexpected.append(name)
    absent = {name for name in wanted.names if name not in copies}
    # A buffer that transformers does without stays as it was computed, if it was: on the meta device it was not.
    excused = absent - conversions.missed(absent) - wanted.parameters if wanted.has_values else set()
    return FoundTensors(
        {name: one_of(found) for name, found in copies.items()},
        [name for name in wanted.names if name in absent - excused],
        sorted(conversions.unexpected(set(unexpected))),
    )


def why_not_opened(sharded: ShardedModel) -> str | None:
    """Return why `from_pretrained()` would make another model of what `save()` writes, or None where it would not.

    Reading it would do so silently, or with no more than a warning: what it misses it makes up.
    """
    if not is_of_transformers(sharded.model):
        return None
    metas = {name: torch.empty(shape, device="meta") for name, shape in ModelTensors(sharded).shapes.items()}
    try:
        skeleton = _skeleton(sharded)
        conversions = _Conversions(skeleton)
        own = skeleton.state_dict()
        mapping = conversions.map_keys(metas, own)
        made = {name: value for each in mapping.conversions for name, value in each.run(metas.__getitem__).items()}
    except UnknownConversionError:
        return None
    except CheckpointError as error:
        return f"it would fail: {error}"
    made |= {name: metas[key] for name, key in mapping.renamed.items()}
    altered = [name for name, value in made.items() if metas.get(name) is not value]
    if altered:
        return f"it would convert {listed(altered)}, which is not stored as it expects"
    missing = conversions.missed(set(own) - _with_tied(skeleton, made))
    return f"it would not find {listed(sorted(missing))}, and make up values" if missing else None


_OF_ADAPTERS = (
    "its tensors have the names of peft's adapters. For a folder that peft opens, call state = "
    "torchacc.full_state_dict(model) on every process, and on one model.save_pretrained(folder, state_dict=state)"
)


def pretrained_files(sharded: ShardedModel, tokenizer: Any) -> dict[str, bytes]:
    """Return what `save_pretrained()` of a model's config, and of a tokenizer, writes."""
    model = sharded.model
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer]
    parts = [part for part in parts if hasattr(part, "save_pretrained")]
    if not parts:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            # A checkpoint has no folders inside; so chat templates go into the tokenizer's own file.
            part.save_pretrained(folder, **({"save_jinja_files": False} if part is tokenizer else {}))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    reason = None
    if "config.json" in files:
        reason = _OF_ADAPTERS if hasattr(model, "peft_config") else why_not_opened(sharded)
    if reason is not None:
        del files["config.json"]
        _log.warning(
            "the checkpoint gets no config.json, so that from_pretrained() refuses it: %s. torchacc loads it", reason
        )
    if "config.json" in files:
        described = json.loads(files["config.json"])
        described |= {"architectures": [sharded.plan.units[-1].module_class], "dtype": sharded.plan.master_dtype}
        files["config.json"] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    return files


@dataclass(frozen=True, eq=False)
class _Conversion:
    """Tensors of a folder of which transformers makes one of a model's, or several."""

    transform: Any
    """The `WeightConverter`, which has collected nothing yet."""
    target: str
    """The first of the names in the model."""
    skeleton: nn.Module
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Patterns of the transform, and names in the folder."""

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert.

        Args:
            read: Returns a tensor of the folder by name; of one on the meta device only the shape is computed.

        Returns:
            The model's name to tensor.
        """
        transform = copy.deepcopy(self.transform)
        for pattern, key in self.sources:
            transform.add_tensor(self.target, key, pattern, functools.partial(read, key))
        try:
            made = transform.convert(self.target, model=self.skeleton, config=self.skeleton.config)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot make {self.target} of {listed([key for _, key in self.sources])}: {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _Converter:
    """Makes a model's tensors, and keeps what the last conversion made."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self._kept: tuple[_Conversion, dict[str, torch.Tensor]] | None = None

    def describe(self, key: str) -> torch.Tensor:
        """Return a tensor of the folder without values."""
        return torch.empty(self.folder.model[key].shape, dtype=self._dtype(key), device="meta")

    def stored(self, conversion: _Conversion, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return one of the tensors that a conversion makes, to be read."""
        keys = [key for _, key in conversion.sources]

        def fill(target: torch.Tensor, start: int) -> None:
            target.copy_(self._make(conversion)[name].reshape(-1)[start : start + len(target)])

        origin = f"{self.folder.path}: {name}, made of {listed(keys, 2)},"
        return StoredTensor(shape, self.folder.model[keys[0]].dtype, origin, fill)

    def _make(self, conversion: _Conversion) -> dict[str, torch.Tensor]:
        """Return the full tensors that a conversion makes."""
        if self._kept is None or self._kept[0] is not conversion:
            self._kept = None  # no two at once
            self._kept = conversion, conversion.run(self._read)
        return self._kept[1]

    def _read(self, key: str) -> torch.Tensor:
        return self.folder.model[key].read().to(self._dtype(key))

    def _dtype(self, key: str) -> torch.dtype:
        # As from_pretrained() does it: first to the model's dtype, then the conversion.
        dtype = self.folder.model[key].dtype
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _KeyMapping(NamedTuple):
    """What becomes of the tensors of a folder."""

    renamed: dict[str, str]
    """Name in the model -> name in the folder."""
    conversions: list[_Conversion]
    unexpected: list[str]
    """What the model does not have, by the name that it would have there."""


class _Conversions:
    """What transformers does with the tensors of a model's checkpoints; needs `_CONVERSIONS`.

    It follows `transformers.core_model_loading.convert_and_load_state_dict_in_model()`, up to where that reads.
    """

    def __init__(self, skeleton: nn.Module) -> None:
        self._skeleton: Any = skeleton
        internals, mapping = _internals()
        self._internals = internals
        found = mapping.get_model_conversion_mapping(skeleton)
        self._renamings = [each for each in found if isinstance(each, internals.WeightRenaming)]
        self._converters = [each for each in found if isinstance(each, internals.WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def map_keys(self, stored: Iterable[str], names: Mapping[str, Any]) -> _KeyMapping:
        """Sort the tensors of a folder by what becomes of them.

        Args:
            stored: Names in the folder.
            names: All names that the model has, as keys.
        """
        renamed: dict[str, str] = {}
        conversions: dict[str, _Conversion] = {}
        unexpected = []
        for key in sorted(stored, key=self._internals.dot_natural_key):  # experts in the order of their numbers
            target, pattern = self._renamed(key, names)
            if target not in names:
                unexpected.append(target)
            elif pattern is not None:
                new = _Conversion(self._by_pattern[pattern], target, self._skeleton)
                conversions.setdefault(target, new).sources.append((pattern, key))
            elif target in renamed:
                raise CheckpointError(f"{renamed[target]} and {key} are both {target} in this model: which is it?")
            else:
                renamed[target] = key
        both = sorted(renamed.keys() & conversions.keys())
        if both:
            raise CheckpointError(f"{both[0]} is in the checkpoint, and so is what it is made of: which is it?")
        return _KeyMapping(renamed, list(conversions.values()), unexpected)

    def missed(self, missing: set[str]) -> set[str]:
        """Return what transformers would not do without, of what is missing."""
        return self._adjusted(missing, set())[0]

    def unexpected(self, unexpected: set[str]) -> set[str]:
        """Return what transformers would not pass over, of what the model does not have."""
        return {name for name in self._adjusted(set(), unexpected)[1] if not _FORMER_BUFFERS.search(name)}

    def _renamed(self, key: str, names: Mapping[str, Any]) -> tuple[str, str | None]:
        rename, prefix = self._internals.rename_source_key, self._skeleton.base_model_prefix
        target, pattern = rename(key, self._renamings, self._converters, prefix, names)
        if target not in names and key in names:
            target, pattern = rename(key, [], [], prefix, names)
        return target, pattern

    def _adjusted(self, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
        # What transformers adjusts in its own `LoadStateDictInfo`.
        info = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        self._skeleton._adjust_missing_and_unexpected_keys(info)
        return info.missing_keys, info.unexpected_keys


def _internals() -> tuple[Any, Any]:
    """Return transformers' module that converts checkpoints, and the one that knows what is converted."""
    version = importlib.metadata.version("transformers")
    unknown = UnknownConversionError(
        f"How transformers {version} converts checkpoints is not known here: open it with from_pretrained(), save it "
        "with save_pretrained(folder, save_original_format=False), and load that; or give the opened model to "
        "accelerate()."
    )
    if not _CONVERSIONS.contains(version, prereleases=True):
        raise unknown
    try:
        from transformers import conversion_mapping, core_model_loading

        given = list(inspect.signature(core_model_loading.rename_source_key).parameters)
        known = [conversion_mapping.get_model_conversion_mapping, core_model_loading.dot_natural_key]
        known += [core_model_loading.WeightRenaming, core_model_loading.WeightConverter.add_tensor]
    except (ImportError, AttributeError):
        raise unknown from None
    if given[: len(_RENAME_ARGUMENTS)] != _RENAME_ARGUMENTS or not all(map(callable, known)):
        raise unknown
    return core_model_loading, conversion_mapping


def _skeleton(sharded: ShardedModel) -> nn.Module:
    """Return the model as `from_pretrained()` would build it, on the meta device.

    The sharded one will not do: an engine may have changed the classes of its modules, by which transformers looks
    conversions up, and the shapes of its parameters.
    """
    if sharded not in _skeletons:
        name = sharded.plan.units[-1].module_class
        built: Any = next(base for base in type(sharded.model).__mro__ if base.__name__ == name)
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                _skeletons[sharded] = built(copy.deepcopy(sharded.model.config))
        except Exception as error:
            raise UnknownConversionError(
                f"How transformers converts its checkpoints cannot be asked, as {name}(config) fails: {error}"
            ) from error
    return _skeletons[sharded]


def _with_tied(skeleton: nn.Module, names: Iterable[str]) -> set[str]:
    """Return names with all others of the same parameters."""
    tied: dict[nn.Parameter, set[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, set()).add(name)
    present = set(names)
    return present.union(*(group for group in tied.values() if group & present))
