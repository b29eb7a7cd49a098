"""Apache TVM: encast's graph as a Relax function of a fixed shape, its kernels searched for by MetaSchedule.

TVM runs what its own code generator makes (the wheel calls no library of products), and a kernel without a schedule
is one scalar loop nest. So the kernels of a shape are searched for when it is first bound, on the processors and with
the threads of the calls, as long as ``tuning_seconds`` says. What was found is kept: a later process only compiles.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.bench.cache import cached, seconds_to_make
from encast.bench.peers.base import ModelFiles
from encast.bench.peers.interpret import Rectangle, interpret
from encast.bench.peers.interpreted import Inputs, InterpretedPeer, Program, only_apart
from encast.bench.peers.transformer import Shape, States, versions
from encast.bench.peers.tvm_relax import INPUTS, RelaxLibrary
from encast.errors import InputError

__all__ = ["Clock", "Tvm", "until"]

_REQUIREMENTS = ("apache-tvm[popen-pool]==0.27.0.post1", "apache-tvm-ffi==0.1.14.post1", "xgboost-cpu==3.2.0")
"""apache-tvm asks for 0.1.14 of its ffi or newer, but ends by SIGSEGV with 0.1.15 when MetaSchedule writes a record."""

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
    defaults: ClassVar[Mapping[str, Any]] = {"tuning_seconds": 240}

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        super().__init__(model, dtype, threads, cache, **options)
        seconds = self.settings["tuning_seconds"]
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise InputError(f"{self.name}: tuning_seconds is {seconds!r}; a number of seconds, at least 0, is needed")
        # Its pool would bind its threads to the first processors of the machine, whichever this process was given.
        os.environ.update(TVM_NUM_THREADS=str(threads), TVM_BIND_THREADS="0", OMP_NUM_THREADS=str(threads))

    @classmethod
    def missing(cls) -> str | None:
        absent = only_apart("tvm", "tvm", *_REQUIREMENTS)
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
            arrays = [tvm.runtime.tensor(vars(inputs)[name]) for name in INPUTS]
            machine.save_function("main", f"bound{made}", *arrays, *stored)
            call = machine[f"bound{made}"]
            return lambda: call().numpy()

        return program

    def _module(self, shape: Shape) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        """The graph in Relax, its ops fused to kernels without a schedule, and the arrays of its weights in order."""
        tvm, relax = self.tvm, self.tvm.relax
        rows, columns = shape
        builder = relax.BlockBuilder()
        library = RelaxLibrary(relax, builder)
        with builder.function("main", attrs={"num_input": len(INPUTS)}):
            with builder.dataflow():
                given = library.inputs(shape)
                out = builder.emit_output(interpret(self.graph, library, Rectangle(rows, columns, **given)).expr)
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
        key = {
            "model": self.model.sha,
            "shape": shape,
            "threads": self.threads,
            "target": str(self.target),
            **self.settings,
            **versions(*_PACKAGES),
        }
        folder = cached(self.cache, "tvm", key, lambda into: self._fill(into, module))
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
