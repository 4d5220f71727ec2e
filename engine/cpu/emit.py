"""Makes numba intrinsics of functions that emit LLVM code, and the few that read and write memory.

An intrinsic takes a tuple of addresses, sizes, and steps in bytes. Inputs may have any alignment that their
elements have. Buffers of floats are tight.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from engine.cpu.vectors import F32, FLOAT, I64, Vectors

_EMITTERS: list[tuple[Callable[..., None], list[Any], str]] = []
_LLVM = {types.int64: I64, types.float32: F32}


def host_has(feature: str) -> bool:
    """Whether the CPU that numba compiles for has the LLVM ``feature``."""
    own = config.CPU_NAME is None and config.CPU_FEATURES is None
    return own and bool(binding.get_host_cpu_features().get(feature))


def action(
    *kinds: Any, needs: str = ""
) -> Callable[[Callable[..., None]], Callable[[tuple[Any, ...]], None]]:
    """An intrinsic of one tuple of numbers from a function that emits code for them.

    ``needs``: an LLVM feature of the CPU; without it (`host_has`) the intrinsic does nothing.

    It becomes an LLVM function, emitted once and never inlined: its constants and sums have all registers to
    themselves, while in a caller's loops LLVM would keep them on the stack.
    """

    parameters = [_LLVM[kind] for kind in kinds]
    serves = not needs or host_has(needs)

    def made(emit: Callable[..., None]) -> Callable[[tuple[Any, ...]], None]:
        _EMITTERS.append((emit, parameters, needs))

        def typed(typing_context: Any, arguments: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                if serves:
                    function = _defined(builder.module, emit, parameters)
                    builder.call(function, cgutils.unpack_tuple(builder, values[0]))
                return context.get_dummy_value()

            return types.void(types.Tuple(kinds)), generate

        return intrinsic(typed)  # type: ignore[no-any-return]  # numba is untyped

    return made


def _defined(module: Any, emit: Callable[..., None], kinds: list[Any]) -> Any:
    name = f"foretick_{emit.__name__}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(Vectors(builder), *function.args)
    builder.ret_void()
    return function


def emitted(module: Any, features: Container[str]) -> list[str]:
    """Emit every action so far into ``module``, to compile them for a CPU with ``features``; their names."""
    having = [(emit, kinds) for emit, kinds, needs in _EMITTERS if not needs or needs in features]
    return [_defined(module, emit, kinds).name for emit, kinds in having]


def integers(
    count: int, needs: str = ""
) -> Callable[[Callable[..., None]], Callable[[tuple[Any, ...]], None]]:
    """`action` of whole numbers."""
    return action(*[types.int64] * count, needs=needs)


def _reader(kind: Any, result: Any) -> Callable[[Any, Any], Any]:
    def read(typing_context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            v = Vectors(builder)
            return v.load(v.at(values[0], v.times(values[1], 8 if kind is I64 else FLOAT)), kind)

        return result(types.int64, types.int64), generate

    return intrinsic(read)  # type: ignore[no-any-return]  # numba is untyped


def _writer(kind: Any, argument: Any) -> Callable[[Any, Any, Any], None]:
    def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            v = Vectors(builder)
            v.store(values[2], v.at(values[0], v.times(values[1], 8 if kind is I64 else FLOAT)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, argument), generate

    return intrinsic(write)  # type: ignore[no-any-return]  # numba is untyped


integer_at: Callable[[Any, Any], int] = _reader(I64, types.int64)
"""The int64 at an address plus ``index``."""
float_at: Callable[[Any, Any], Any] = _reader(F32, types.float32)
"""The float32 at an address plus ``index``."""
put_integer: Callable[[Any, Any, Any], None] = _writer(I64, types.int64)
put_float: Callable[[Any, Any, Any], None] = _writer(F32, types.float32)


def _taken(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, I64(1), "acq_rel")

    return types.int64(types.int64), generate


take: Callable[[Any], int] = intrinsic(_taken)
"""The int64 at an address, which becomes one more, for all threads."""
