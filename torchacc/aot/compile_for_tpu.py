"""Compile a recorded program for TPUs that are not there.

It is a program of its own, `python -I compile_for_tpu.py FOLDER`, in a process of its own: it uses JAX's client of
libtpu, and neither PyTorch nor torch_xla. FOLDER has `program.pb`, an HloModuleProto, and `request.json`; there it
writes `optimized.txt` and `compiled.json`.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MEMORY = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")


def main(folder: Path) -> None:
    """Compile what lies in a folder."""
    from jax.experimental import topologies

    request = json.loads((folder / "request.json").read_text())
    topology = topologies.get_topology_desc(request["topology"], platform="tpu", **request["topology_options"])
    devices = sorted(topology.devices, key=lambda device: device.id)
    began = time.monotonic()
    executable = devices[0].client.compile(*_arguments(folder, request, devices))
    took = time.monotonic() - began
    memory = executable.get_compiled_memory_stats()
    costs = executable.cost_analysis()
    (folder / "optimized.txt").write_text(executable.hlo_modules()[0].to_string())
    found = {
        "seconds": took,
        "device_kind": devices[0].device_kind,
        "memory": {name: getattr(memory, name) for name in MEMORY},
        "flops": costs.get("flops"),
        "bytes_accessed": costs.get("bytes accessed"),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
    }
    (folder / "compiled.json").write_text(json.dumps(found))


def _arguments(folder: Path, request: dict[str, Any], devices: list[Any]) -> tuple[Any, Any, Any]:
    """Return what the client's compile() takes."""
    import numpy as np
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc

    if len(devices) != request["num_devices"]:
        raise SystemExit(
            f"{request['topology']} has {len(devices)} devices, and the program is for {request['num_devices']}"
        )
    options = xc.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    build.use_shardy_partitioner = False  # the annotations are GSPMD's
    build.allow_spmd_sharding_propagation_to_output = [True]
    order = xc.DeviceAssignment.create(np.arange(len(devices)).reshape(1, -1))
    options.device_assignment = build.device_assignment = order
    options.env_option_overrides = list(request["flags"].items())
    return _module(folder, request["inputs"]), _jax.DeviceList(tuple(devices)), options


def _module(folder: Path, inputs: list[dict[str, Any]]) -> Any:
    """Return the program in the form that the client takes, with its inputs' shardings and donations."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc
    from jaxlib.mlir import ir

    text = _jax.mlir.xla_computation_to_mlir_module(xc.XlaComputation((folder / "program.pb").read_bytes()))
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        main = next(each for each in module.body.operations if each.name.value == "main")
        attributes = []
        for own, given in zip(main.arg_attrs, inputs, strict=True):
            named = {each.name: each.attr for each in own}
            named["mhlo.sharding"] = ir.StringAttr.get(given["sharding"])
            if given["is_donated"]:
                named["jax.buffer_donor"] = ir.BoolAttr.get(True)
            attributes.append(ir.DictAttr.get(named))
        main.arg_attrs = ir.ArrayAttr.get(attributes)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
