"""Which families the native engine may split by the plan that they declare: those that train as the unsharded model.

python tests/contract/split_families.py build/split-families

tries all, and writes the page's table and `torchacc/engines/native/verified_plans.py`. It goes on where it was
interrupted: what each came to stays in the folder, until that is removed.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from families import all_families
from sweep import sweep

from torchacc.engines.native.verified_plans import fingerprint
from torchacc.parallel.tensor_parallel import FAMILIES

ENGINE = "native-tp"
ROOT = Path(__file__).parents[2]
PAGE, SOURCE = ROOT / "docs" / "tensor_parallel.md", ROOT / "torchacc" / "engines" / "native" / "verified_plans.py"


def with_plans() -> dict[str, Any]:
    """Return the classes of configurations that declare a plan, or have one here, by the name of a family."""
    import transformers

    found = {name: getattr(transformers, each.model_class).config_class for name, each in all_families().items()}
    return {name: cls for name, cls in found.items() if cls.model_type in FAMILIES or declared_by(cls)}


def declared_by(cls: Any) -> dict[str, str]:
    return getattr(cls, "base_model_tp_plan", None) or {}


def plans(found: Mapping[str, Mapping[str, Any]], classes: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of the plans of the families all of whose classes agree, by `model_type`."""
    agree = {classes[name].model_type for name, facts in found.items() if facts["outcome"] == "agrees"}
    agree -= {classes[name].model_type for name, facts in found.items() if facts["outcome"] != "agrees"}
    by_type = {cls.model_type: fingerprint(cls) for cls in classes.values()}
    return {name: by_type[name] for name in sorted(agree - set(FAMILIES))}


def table(found: Mapping[str, Mapping[str, Any]], classes: Mapping[str, Any]) -> str:
    import transformers

    split = [*FAMILIES, *plans(found, classes)]
    lines = [f"With transformers {transformers.__version__}: {', '.join(f'`{name}`' for name in sorted(split))}.", ""]
    lines += ["| refused | what came of its own plan |", "|---|---|"]
    for name, facts in found.items():
        if facts["outcome"] != "agrees":
            reason = " ".join(facts.get("reason", "").split()).replace("|", "\\|").replace("`", "'")
            reason = reason.replace("_", "\\_").replace("[", "\\[").replace("*", "\\*")
            lines.append(f"| `{classes[name].model_type}` | {facts['outcome']}: {reason[:140]} |")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def replaced(text: str, begin: str, end: str, new: str) -> str:
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end, 1)[1]


def main() -> None:
    classes = with_plans()
    found = sweep(ENGINE, Path(sys.argv[1]), list(classes))
    entries = "".join(f'    "{name}": "{mark}",\n' for name, mark in plans(found, classes).items())
    SOURCE.write_text(re.sub(r"= \{[^}]*\}", lambda _: f"= {{\n{entries}}}", SOURCE.read_text(), count=1))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        replaced(page, "<!-- families -->\n", "<!-- end -->\n", "\n" + table(found, classes) + "\n"), "utf-8"
    )


if __name__ == "__main__":
    main()
