"""Atomic loads, stores and fences on elements of a uint64 array, for numba kernels.

Thin intrinsics over LLVM's atomic instructions, so that two processes may share a ring without locks: the
memory order is in the name. Arrays are one-dimensional and C-contiguous.
"""

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_SPIN_HINT = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _loader(order: str) -> Callable[[Any, Any], Any]:
    def load(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_address(context, builder, signature.args[0], *args), order, 8)

        return types.uint64(array, types.intp), generate

    return intrinsic(load)  # type: ignore[no-any-return]  # numba is untyped


def _storer(order: str) -> Callable[[Any, Any, Any], None]:
    def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = _address(context, builder, signature.args[0], *args[:2])
            builder.store_atomic(args[2], address, order, 8)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.uint64), generate

    return intrinsic(store)  # type: ignore[no-any-return]  # numba is untyped


def _fencer(order: str) -> Callable[[], None]:
    def fence(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(fence)  # type: ignore[no-any-return]  # numba is untyped


def _spin_hint(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _SPIN_HINT is not None:
            hint = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, _SPIN_HINT), [])
        return context.get_dummy_value()

    return types.void(), generate


load_acquire = _loader("acquire")
load_relaxed = _loader("monotonic")
store_release = _storer("release")
store_relaxed = _storer("monotonic")
fence_acquire = _fencer("acquire")
fence_release = _fencer("release")
fence_total = _fencer("seq_cst")
relax: Callable[[], None] = intrinsic(_spin_hint)
