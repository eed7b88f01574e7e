"""The layouts between which a checkpoint goes back and forth."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """An engine and its devices."""

    kind: str
    num_devices: int
    dp: int = 1
    flat: bool = False

    @property
    def num_processes(self) -> int:
        return 1 if self.kind == "xla-spmd" else self.num_devices

    @property
    def is_launched(self) -> bool:
        return self.num_processes > 1 or self.kind == "xla-multiprocess"

    def config(self) -> dict[str, Any]:
        fsdp = {
            "size": self.num_devices // self.dp,
            "use_spmd": self.kind == "xla-spmd",
            "flatten_parameters": self.flat,
        }
        if self.dp > 1:
            fsdp["sharding_strategy"] = "HYBRID_SHARD"
        return {"backend": self.kind.partition("-")[0], "dist": {"dp": {"size": self.dp}, "fsdp": fsdp}}


LAYOUTS = {
    f"{kind}-{num_devices}": Layout(kind, num_devices)
    for kind in ("native", "xla-multiprocess", "xla-spmd")
    for num_devices in (1, 2, 4)
} | {
    "native-4-hybrid": Layout("native", 4, dp=2),
    "xla-multiprocess-2-flat": Layout("xla-multiprocess", 2, flat=True),
}
