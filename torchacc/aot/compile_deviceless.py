"""Compile a recorded program for TPUs or NVIDIA GPUs that are not there.

It is a program of its own, `python -I compile_deviceless.py FOLDER`, in a process of its own: it uses JAX's clients of
libtpu or of XLA's plugin for CUDA, and neither PyTorch nor torch_xla. FOLDER has `program.pb`, an HloModuleProto, and
`request.json`; there it writes `optimized.txt` and `compiled.json`.
"""

import ctypes
import json
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

MEMORY = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
_PR_SET_PDEATHSIG = 1
_MOVED = "bytes accessed"
"""What XLA's analysis calls the bytes to and from the device's memory."""


def main(folder: Path) -> None:
    """Compile what lies in a folder."""
    request = json.loads((folder / "request.json").read_text())
    is_gpu = request["platform"] == "CUDA"
    dump = folder / "dump"
    if is_gpu:  # an executable for GPUs that are not there tells neither its program nor its costs
        request["flags"] |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    devices = sorted(_gpus(request) if is_gpu else _tpus(request), key=lambda device: device.id)
    began = time.monotonic()
    executable = devices[0].client.compile(*_arguments(folder, request, devices))
    took = time.monotonic() - began
    memory = executable.get_compiled_memory_stats()
    text, costs = _read_dump(dump) if is_gpu else _ask(executable)
    (folder / "optimized.txt").write_text(text)
    found = {
        "seconds": took,
        "device_kind": devices[0].device_kind,
        "memory": {name: getattr(memory, name) for name in MEMORY},
        **costs,
        "num_characters": len(text),
        "versions": request["versions"],
    }
    (folder / "compiled.json").write_text(json.dumps(found))


def _tpus(request: dict[str, Any]) -> list[Any]:
    from jax.experimental import topologies

    found = topologies.get_topology_desc(request["topology"], platform="tpu", **request["topology_options"])
    return list(found.devices)


def _gpus(request: dict[str, Any]) -> list[Any]:
    """Return what the plugin describes. Its package, which would look for CUDA and a driver, is not imported."""
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc

    wheel, library = request["plugin"]
    plugin = _jax.load_pjrt_plugin("cuda", str(distribution(wheel).locate_file(library)), None)
    found = xc.make_c_api_device_topology(plugin, request["topology"], **request["topology_options"])
    return list(found._make_compile_only_devices())


def _ask(executable: Any) -> tuple[str, dict[str, Any]]:
    """Return the text of a program for TPUs, and what it computes and moves."""
    costs = executable.cost_analysis()
    text = executable.hlo_modules()[0].to_string()
    more = _of_loops(text)
    return text, {"flops": costs["flops"] + more["flops"], "bytes_accessed": costs[_MOVED] + more[_MOVED]}


def _read_dump(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a program for GPUs, and what it computes and moves.

    Products are counted as one device has them before they are fused, or made calls of a library.
    """
    plain = [*folder.glob("*.after_spmd_partitioner.txt"), *folder.glob("*.before_optimizations.txt")][0].read_text()
    text = next(folder.glob("*.*_gpu_after_optimizations.txt")).read_text()
    shutil.rmtree(folder)
    flops = _costs(plain)["flops"] + _of_loops(plain)["flops"]
    return text, {"flops": flops, "bytes_accessed": _costs(text)[_MOVED] + _of_loops(text)[_MOVED]}


def _costs(text: str) -> dict[str, float]:
    """Return what XLA counts of a program, by name. It counts a loop's body once."""
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc

    found: dict[str, float] = _jax.hlo_module_cost_analysis(xc.make_cpu_client(), _jax.hlo_module_from_text(text))
    return found


def _of_loops(text: str) -> Counter[str]:
    """Return what the bodies of a program's loops cost beyond the first time."""
    programs, total = _scheduled_program(), Counter[str]()
    for body, times in programs.parse(text).loops():
        total.update({name: times * cost for name, cost in _costs(programs.cut_out(text, body)).items()})
    return total


def _scheduled_program() -> ModuleType:
    """Return the module beside this file, without the package, which would import PyTorch."""
    name = "scheduled_program"
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


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
    order = xc.DeviceAssignment.create(np.array(_ordered(devices, request["places"])).reshape(1, -1))
    options.device_assignment = build.device_assignment = order
    options.env_option_overrides = list(request["flags"].items())
    return _module(folder, request["inputs"]), _jax.DeviceList(tuple(devices)), options


def _ordered(devices: list[Any], places: list[list[int]]) -> list[int]:
    """Return the numbers of the devices that lie at some places: slice, position and core. Without places, of all."""
    if not places:
        return [each.id for each in devices]
    number = {(getattr(each, "slice_index", None) or 0, *each.coords, each.core_on_chip): each.id for each in devices}
    return [number[tuple(place)] for place in places]


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


def _end_with_parent() -> None:
    """Have Linux end this process with the one that waits for it, however that ends."""
    with suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    main(Path(sys.argv[1]))
