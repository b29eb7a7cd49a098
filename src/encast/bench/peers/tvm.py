"""Apache TVM: encast's graph as a Relax function of a fixed shape, its kernels searched for by MetaSchedule.

TVM runs what its own code generator makes (the wheel calls no library of products), and a kernel without a schedule
is one scalar loop nest. So the kernels of a shape are searched for when it is first bound, on the processors and with
the threads of the calls, as long as ``tuning_seconds`` says. What was found is kept: a later process only compiles.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.bench.cache import seconds_to_make
from encast.bench.peers.base import Shape, States
from encast.bench.peers.interpret import Array, ArrayLibrary, Inputs, InterpretedPeer, Program, input_types, interpret

__all__ = ["Clock", "RelaxLibrary", "Tvm", "until"]

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "xgboost-cpu")
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")
_SEARCHED = "searched.json"
_TRIALS_A_TURN = 8
_WITHOUT_END = 1_000_000
_STEP_SECONDS = 120.0
"""Of one build or run of a candidate; a machine with other work may be slow."""


class Tvm(InterpretedPeer):
    """``tuning_seconds``: of the search for a shape. It goes on until each kernel has had a turn.

    A search longer than ``limits.bind_seconds`` needs that limit raised as well.
    """

    name = "Apache TVM"
    dtypes = ("f32",)
    modules = ("tvm",)
    # apache-tvm asks for 0.1.14 of its ffi or newer, but ends by SIGSEGV with 0.1.15 when MetaSchedule writes a record.
    requirements = ("apache-tvm[popen-pool]==0.27.0.post1", "apache-tvm-ffi==0.1.14.post1", "xgboost-cpu==3.2.0")
    accepted: ClassVar = {"tuning_seconds": 240}
    # Its pool would bind its threads to the first processors of the machine, whichever this process was given.
    variables: ClassVar = {"TVM_NUM_THREADS": "{threads}", "TVM_BIND_THREADS": "0", "OMP_NUM_THREADS": "{threads}"}

    @classmethod
    def missing(cls) -> str | None:
        absent = super().missing()
        if absent is None and "CXX" not in os.environ and not any(map(shutil.which, _COMPILERS)):
            return f"no C++ compiler ({', '.join(_COMPILERS)}), with which it links what it makes: install one of them"
        return absent

    def start(self) -> None:
        self.tvm: Any = importlib.import_module("tvm")
        codegen: Any = importlib.import_module("tvm.target.codegen")
        self.target = self.tvm.target.Target(
            {
                "kind": "llvm",
                "mcpu": codegen.llvm_get_system_cpu(),
                "mattr": ["-prefer-256-bit"],  # else LLVM halves vectors of 512 bits
                "num-cores": self.threads,
            }
        )
        self.searched: dict[str, Mapping[str, Any]] = {}

    def compile(self, shape: Shape) -> Program:
        tvm, relax = self.tvm, self.tvm.relax
        module, weights = self._module(shape)
        folder = self._search(shape, module)
        with self.target, tvm.transform.PassContext(opt_level=3):
            passes = [
                relax.transform.MetaScheduleApplyDatabase(str(folder)),
                relax.transform.SplitLayoutRewritePreproc(),
                relax.transform.LiftTransformParams(),
                relax.transform.FoldConstant(),
            ]
            executable = tvm.compile(tvm.transform.Sequential(passes)(module), self.target)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        # Weights in the layouts that the kernels want, once.
        stored = machine["main_transform_params"]([tvm.runtime.tensor(np.ascontiguousarray(one)) for one in weights])
        made = 0

        def program(inputs: Inputs) -> States:
            nonlocal made
            made += 1
            arrays = [tvm.runtime.tensor(array) for array in inputs.values()]
            machine.save_function("main", f"bound{made}", *arrays, *stored)
            call = machine[f"bound{made}"]
            return lambda: call().numpy()

        return program

    def _module(self, shape: Shape) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        """The graph in Relax, its ops fused to kernels without a schedule, and the arrays of its weights in order."""
        tvm, relax = self.tvm, self.tvm.relax
        builder = relax.BlockBuilder()
        library = RelaxLibrary(relax, builder)
        given = {name: library.parameter(name, *kind) for name, kind in input_types(shape).items()}
        with builder.function("main", attrs={"num_input": len(given)}):
            with builder.dataflow():
                out = builder.emit_output(interpret(self.graph, library, shape, given).expr)
            parameters = [*given.values(), *library.parameters.values()]
            builder.emit_func_output(out, params=[value.expr for value in parameters])
        passes = [
            relax.transform.DecomposeOpsForInference(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.FastMathTransform(),  # exp, erf and tanh as polynomials, which vectors can compute
            relax.get_pipeline("zero"),
            relax.transform.AttachAttrLayoutFreeBuffers(),
        ]
        with self.target:
            module = tvm.transform.Sequential(passes)(builder.finalize())
        return module, list(library.arrays.values())

    def _search(self, shape: Shape, module: Any) -> Path:
        """The folder of MetaSchedule's records for that module."""
        settings = {"shape": shape, "threads": self.threads, "target": str(self.target), **self.settings}
        folder = self.kept("tvm", lambda into: self._fill(into, module), _PACKAGES, **settings)
        found = json.loads((folder / _SEARCHED).read_text(encoding="utf-8"))
        self.searched["x".join(map(str, shape))] = {**found, "seconds": round(seconds_to_make(folder), 1)}
        return folder

    def _fill(self, folder: Path, module: Any) -> None:
        self.tried = True
        schedule: Any = importlib.import_module("tvm.s_tir.meta_schedule")
        integration: Any = importlib.import_module("tvm.s_tir.meta_schedule.relax_integration")
        logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
        clock = Clock()
        with self.target:
            tasks, weights = integration.extracted_tasks_to_tune_contexts(
                integration.extract_tasks(module, self.target),
                str(folder),
                # A quarter of its usual population: with few processors most of the time would go to choosing.
                strategy=until(
                    clock, schedule.search_strategy.EvolutionarySearch(population_size=128, init_min_unmeasured=16)
                ),
                num_threads=self.threads,
                seed=0,
            )
            clock.end = time.monotonic() + float(self.settings["tuning_seconds"])
            schedule.tune_tasks(
                tasks=tasks,
                task_weights=weights,
                work_dir=str(folder),
                max_trials_global=_WITHOUT_END,
                num_trials_per_iter=_TRIALS_A_TURN,
                builder=schedule.builder.LocalBuilder(
                    max_workers=self.threads, timeout_sec=_STEP_SECONDS, f_build=build
                ),
                runner=schedule.runner.LocalRunner(timeout_sec=_STEP_SECONDS),
            )
        shutil.rmtree(folder / "logs", ignore_errors=True)
        (folder / _SEARCHED).write_text(
            json.dumps({"kernels": len(tasks), "trials": clock.trials, "failed": clock.failed}), encoding="utf-8"
        )

    def facts(self) -> Mapping[str, Any]:
        return {
            "version": self.tvm.__version__,
            "threads": self.threads,
            "target": str(self.target),
            **self.settings,
            "searched": self.searched,
            "inputs": "tensors made before the call",
        }


def build(module: Any, target: Any, parameters: Any) -> Any:
    """What MetaSchedule's own builder does, but for TVM's tensor intrinsics, which f32 uses none of.

    Called in the builders' processes, which are new at every turn: loading them took each 14 s.
    """
    tvm: Any = importlib.import_module("tvm")
    without_layouts = importlib.import_module("tvm.s_tir.transform").RemoveWeightLayoutRewriteBlock
    return tvm.driver.build(without_layouts(skip_tensor_rewrite=True)(module), target=target)


@dataclass
class Clock:
    """When a search is to end, on the monotonic clock, and what it has tried so far."""

    end: float = 0.0
    trials: int = 0
    failed: int = 0


def until(clock: Clock, strategy: Any) -> Any:
    """The strategy of a kernel: ``strategy``'s candidates until the clock's end, but at least one turn of them.

    A kernel without further candidates is what MetaSchedule's scheduler expects: it closes the kernel and goes on with
    the others. Closed from outside, from a callback, a kernel may still be the scheduler's next choice or have ended
    by itself, its candidates all tried; either ends the process's search with an internal error.
    """
    search: Any = importlib.import_module("tvm.s_tir.meta_schedule.search_strategy")
    derived: Any = importlib.import_module("tvm.ir.utils").derived_object

    @derived
    class Until(search.PySearchStrategy):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            self.inner, self.began = inner, False

        def _initialize_with_tune_context(self, context: Any) -> None:
            self.inner._initialize_with_tune_context(context)

        def pre_tuning(self, *settings: Any) -> None:
            self.inner.pre_tuning(*settings)

        def post_tuning(self) -> None:
            self.inner.post_tuning()

        def generate_measure_candidates(self) -> Any:
            if self.began and time.monotonic() >= clock.end:
                return None
            self.began = True
            return self.inner.generate_measure_candidates()

        def notify_runner_results(self, candidates: Any, results: Any) -> None:
            clock.trials += len(results)
            clock.failed += sum(result.run_secs is None for result in results)
            self.inner.notify_runner_results(candidates, results)

        def clone(self) -> Any:
            return Until(self.inner.clone())

    return Until(strategy)


@dataclass(frozen=True)
class _Value:
    """A value of the function; ``expr`` is Relax's variable."""

    library: RelaxLibrary
    expr: Any

    def __add__(self, other: _Value) -> _Value:
        return self.library.emit("add", self, other)

    def __mul__(self, factor: float) -> _Value:
        return self.library.emit("multiply", self, self.library.number(np.float32(factor)))


class RelaxLibrary(ArrayLibrary):
    """Emits into the dataflow block that ``builder`` is in. Constants become parameters, by name and in order.

    As parameters they keep out of the program's text, and TVM may change their layout once, when they are given.
    """

    def __init__(self, relax: Any, builder: Any) -> None:
        self.relax, self.builder = relax, builder
        self.parameters: dict[str, _Value] = {}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}

    def parameter(self, name: str, shape: Sequence[int], dtype: Any) -> _Value:
        return _Value(self, self.relax.Var(name, self.relax.TensorType(list(shape), str(np.dtype(dtype)))))

    def emit(self, op: str, *operands: Any, **attributes: Any) -> _Value:
        """Relax's function of that name below ``relax.op``."""
        function = self.relax.op
        for part in op.split("."):
            function = getattr(function, part)
        given = [operand.expr if isinstance(operand, _Value) else operand for operand in operands]
        return _Value(self, self.builder.emit(function(*given, **attributes)))

    def number(self, value: Any) -> _Value:
        return _Value(self, self.relax.const(value, str(np.asarray(value).dtype)))

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        if name not in self.parameters:
            self.arrays[name] = array
            self.parameters[name] = self.parameter(f"weight{len(self.parameters)}", array.shape, array.dtype)
        return self.parameters[name]

    def take(self, table: Array, ids: Array) -> Array:
        return self.emit("take", table, ids, axis=0, mode="clip")

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.emit("reshape", x, shape)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.emit("permute_dims", x, list(axes))

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        return self.emit("matmul", a, self.transpose(b, (0, 1, 3, 2)) if transpose_b else b)

    def softmax(self, x: Array) -> Array:
        return self.emit("nn.softmax", x, axis=-1)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        return self.emit("nn.layer_norm", x, gamma, beta, axes=-1, epsilon=eps)

    def activation(self, x: Array, kind: str) -> Array:
        if kind == "gelu":  # by its parts, of which the quick form of erf is known
            half = self.emit("erf", x * float(np.sqrt(0.5))) + self.number(np.float32(1))
            return self.emit("multiply", x * 0.5, half)
        return self.emit({"relu": "nn.relu", "silu": "nn.silu", "tanh": "tanh", "gelu_tanh": "nn.gelu_tanh"}[kind], x)

    def positions(self, ids: Array, skip_id: int) -> Array:
        counted = self.emit("astype", self.emit("not_equal", ids, self.number(np.int32(skip_id))), "int32")
        return self.emit("multiply", self.emit("cumsum", counted, axis=1, dtype="int32"), counted)
