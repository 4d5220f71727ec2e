"""Compiles kernels for sm_90 without a GPU and describes them; `test_engine_triton` runs it as a module.

Prints a JSON list with an object for each variant. A process of its own, because under TRITON_INTERPRET=1
kernels cannot be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.device_metadata import TILES
from engine.attention.triton import HOPPER_BYTES, merge_shape, tiling
from engine.attention.triton_kernels import attend, merge, rotation_table
from engine.fused.kernels import add_norm, rotate_and_write, swiglu

ADA_BYTES = 99 << 10
"""Shared memory of a program on an L4, an A10 or a GeForce of their generations."""
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTERS = {
    "items": "i32",
    "entries": "i32",
    "targets": "i32",
    "offsets": "i32",
    "shifts": "i32",
    "table": "fp32",
    "part_out": "fp32",
    "part_lse": "fp32",
    "inv_freq": "fp64",
    "cos": "fp32",
    "sin": "fp32",
    "slots": "i64",
}
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "add_norm": (add_norm, {"WIDTH": 4096, "PADDED": 4096, "ADDS": True}),
    "rotate_and_write": (
        rotate_and_write,
        {"KV_HEADS": 8, "GROUPS": 4, "HALF": 64, "HEADS_PADDED": 8, "HALF_PADDED": 64, "NORMS": True},
    ),
    "swiglu": (swiglu, {"INNER": 14336, "BLOCK": 1024}),
}


def variants() -> list[dict[str, Any]]:
    """Each head dim and tile, fp16 where registers are scarcest; windows are runtime data, and sinks belong
    to the merge.
    """
    made: list[dict[str, Any]] = [{"kernel": "rotation_table", "dtype": "fp32"}]
    for dtype in ("bf16", "fp16"):
        for sinks, rows in ((False, 1), (True, 64)):
            made.append({"kernel": "merge", "dtype": dtype, "dim": 128, "sinks": sinks, "rows": rows})
        for dim in (64, 128, 256) if dtype == "bf16" else (256,):
            tiles = (16, 64, 128) if dtype == "bf16" else (16,)
            for tile in tiles[: 2 if dim == 256 else 3]:
                softcap = dtype == "fp16" or tile == 64
                made.append(
                    {"kernel": "attend", "dtype": dtype, "dim": dim, "tile": tile, "softcap": softcap}
                )
    older = {"kernel": "attend", "dtype": "bf16", "dim": 128, "softcap": False, "target": 89}
    made += [older | {"tile": tile} for tile in TILES]  # older GPUs have less shared memory
    made.append({"kernel": "attend", "dtype": "bf16", "dim": 96, "tile": 16, "softcap": False})
    made.append({"kernel": "attend", "dtype": "fp32", "dim": 128, "tile": 16, "softcap": False})
    return [*made, *({"kernel": name, "dtype": "bf16"} for name in FUSED)]


def source(kernel: Any, dtype: str, constants: dict[str, Any]) -> ASTSource:
    """As the launcher specialises a real call: 16-byte aligned pointers, strides in whole 16-byte steps."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("stride"):
            signature[name] = "i32"
            aligned[(index,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "softcap", "epsilon"):
            signature[name] = "fp32"
        else:
            signature[name] = "*" + POINTERS.get(name, dtype)
            aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, aligned)


def build(variant: dict[str, Any]) -> Any:
    dtype, kind = variant["dtype"], variant["kernel"]
    if kind == "rotation_table":
        kernel, constants, options = rotation_table, {"HALF": 64, "BLOCK": 64}, {"num_warps": 1}
    elif kind == "merge":
        parts, columns = merge_shape(variant["rows"])
        constants = {"HEADS": 32, "VALUE_DIM": variant["dim"], "SINKS": variant["sinks"]}
        constants |= {"PARTS": parts, "COLUMNS": columns, "EARLY": True}
        kernel, options = merge, {"num_warps": 4}
    elif kind in FUSED:
        kernel, constants = FUSED[kind]
        constants, options = constants | {"EARLY": True}, {"num_warps": 4, "launch_pdl": True}
    else:
        dim = variant["dim"]
        padded = triton.next_power_of_2(dim)
        hopper = variant.get("target", 90) >= 90
        shape = tiling(variant["tile"], padded, TYPES[dtype], HOPPER_BYTES if hopper else ADA_BYTES)
        constants = {"KV_HEADS": 8, "GROUPS": 4, "KEY_DIM": dim, "VALUE_DIM": dim, "KEY_PADDED": padded}
        constants |= {"VALUE_PADDED": padded, "HALF": dim // 2, "SOFTCAP": variant["softcap"]}
        constants |= {"TILE": variant["tile"], "BLOCK": shape.block, "EARLY": hopper}
        kernel, options = attend, {"num_warps": shape.warps, "num_stages": shape.stages}
    target = GPUTarget("cuda", variant.get("target", 90), 32)
    return triton.compile(source(kernel, dtype, constants), target=target, options=options)


def describe(variant: dict[str, Any]) -> dict[str, Any]:
    """Shared memory and spills in bytes, registers a thread, and what the machine code is made of."""
    compiled = build(variant)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "--dump-resource-usage", cubin.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)
    return {
        **variant,
        "shared": compiled.metadata.shared,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "wgmma": ptx.count("wgmma.mma_async.sync"),
        "mma": ptx.count("mma.sync"),
        "async_copies": widths.count("0x10"),
        "narrow_copies": len(widths) - widths.count("0x10"),
    }


if __name__ == "__main__":
    json.dump([describe(variant) for variant in variants()], sys.stdout)
