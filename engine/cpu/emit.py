"""Makes numba intrinsics of functions that emit LLVM code, and the few that read and write memory.

An intrinsic takes a tuple of addresses, sizes, and steps in bytes. Inputs may have any alignment that their
elements have. Buffers of floats are tight.
"""

from collections.abc import Callable, Container
from inspect import Parameter, Signature, signature
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from engine.cpu.vectors import F32, FLOAT, I64, Vectors

_EMITTERS: list[tuple[Callable[..., None], list[Any], str]] = []


def host_has(feature: str) -> bool:
    """Whether the CPU that numba compiles for has the LLVM ``feature``."""
    own = config.CPU_NAME is None and config.CPU_FEATURES is None
    return own and bool(binding.get_host_cpu_features().get(feature))


def action(
    integers: int, floats: int = 0, needs: str = ""
) -> Callable[[Callable[..., None]], Callable[[tuple[Any, ...]], None]]:
    """An intrinsic of one tuple, whole numbers before floats, from a function that emits code for them.

    ``needs``: an LLVM feature of the CPU; without it (`host_has`) the intrinsic does nothing.

    It becomes an LLVM function, emitted once and never inlined: its constants and sums have all registers to
    themselves, while in a caller's loops LLVM would keep them on the stack.
    """
    kinds = [types.int64] * integers + [types.float32] * floats
    parameters = [I64] * integers + [F32] * floats
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


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An intrinsic of numbers from a function that emits code for them, in place, and returns the result.

    ``result``, ``arguments``: numba's types; a pointer is emitted as an address.
    """

    def made(emit: Callable[..., Any]) -> Callable[..., Any]:
        def typed(typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signed: Any, values: Any) -> Any:
                found = emit(Vectors(builder), *values)
                if isinstance(result, types.CPointer):
                    return builder.inttoptr(found, context.get_value_type(result))
                return context.get_dummy_value() if result is types.void else found

            return result(*arguments), generate

        # numba wants to see each argument
        names = ["typing_context", *list(signature(emit).parameters)[1:]]
        kind = Parameter.POSITIONAL_OR_KEYWORD
        vars(typed)["__signature__"] = Signature([Parameter(name, kind) for name in names])
        return intrinsic(typed)  # type: ignore[no-any-return]  # numba is untyped

    return made


@instruction(types.int64, types.int64, types.int64)
def integer_at(v: Vectors, address: Any, index: Any) -> Any:
    """The int64 at an address plus ``index``."""
    return v.load(v.at(address, v.times(index, 8)), I64)


@instruction(types.float32, types.int64, types.int64)
def float_at(v: Vectors, address: Any, index: Any) -> Any:
    """The float32 at an address plus ``index``."""
    return v.load(v.at(address, v.times(index, FLOAT)), F32)


@instruction(types.void, types.int64, types.int64, types.int64)
def put_integer(v: Vectors, address: Any, index: Any, value: Any) -> None:
    """Write an int64 at an address plus ``index``."""
    v.store(value, v.at(address, v.times(index, 8)))


@instruction(types.void, types.int64, types.int64, types.float32)
def put_float(v: Vectors, address: Any, index: Any, value: Any) -> None:
    """Write a float32 at an address plus ``index``."""
    v.store(value, v.at(address, v.times(index, FLOAT)))


@instruction(types.int64, types.int64)
def take(v: Vectors, address: Any) -> Any:
    """The int64 at an address, which becomes one more, for all threads."""
    place = v.builder.inttoptr(address, I64.as_pointer())
    return v.builder.atomic_rmw("add", place, I64(1), "acq_rel")
