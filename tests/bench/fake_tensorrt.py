"""TensorRT's API, as far as the peer calls it, over ONNX Runtime on the CPU: names and arguments are those of the
bindings of 11.4, and what they refuse is refused. Memory is given by address, as there."""

from __future__ import annotations

import ctypes
import enum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import numpy as np

__spec__ = ModuleSpec("tensorrt", None)  # as others find it that look what is installed
__version__ = "11.4.0.106"
ARRAYS = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}
built: list[SimpleNamespace] = []
"""Of every engine: its config, and the types and shapes of its inputs and outputs."""


class BuilderFlag(enum.Enum):
    TF32 = enum.auto()


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IBuilderConfig:
    def __init__(self) -> None:
        self.builder_optimization_level = 3
        self.flags = {BuilderFlag.TF32}

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.remove(flag)


class INetworkDefinition:
    model: Any = None


class IHostMemory(bytes):
    pass


class Builder:
    def __init__(self, logger: ILogger) -> None:
        assert isinstance(logger, ILogger)
        self.logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        model = network.model
        if not model.graph.node:
            self.logger.log(ILogger.Severity.ERROR, "Network must have at least one output")
            self.logger.log(ILogger.Severity.WARNING, "what follows")
            return None
        types = [type_of(value.type.tensor_type) for value in (*model.graph.input, *model.graph.output)]
        built.append(SimpleNamespace(config=config, types=types))
        return IHostMemory(model.SerializeToString())


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self.network, self.logger = network, logger

    def parse_from_file(self, model: str) -> bool:
        import onnx

        assert isinstance(model, str)
        try:
            self.network.model = onnx.load(model)
        except Exception:
            self.logger.log(ILogger.Severity.ERROR, "Failed to parse ONNX model")
            return False
        for node in self.network.model.graph.node:
            if node.op_type == "Attention":
                (found,) = (one for one in node.attribute if one.name == "TRT_decomposable")
                assert found.i == 1
                node.attribute.remove(found)  # ONNX Runtime has no such attribute
        return True


class IExecutionContext:
    def __init__(self, session: Any) -> None:
        self.session, self.addresses = session, dict[str, int]()

    def set_tensor_address(self, name: str, memory: int) -> bool:
        known = {value.name for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        if name in known:
            self.addresses[name] = memory
        return name in known

    def execute_async_v3(self, stream_handle: int) -> bool:
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if self.addresses.keys() != {value.name for value in (*inputs, *outputs)}:
            return False
        found = self.session.run(None, {value.name: self.array(value) for value in inputs})
        for value, array in zip(outputs, found, strict=True):
            self.array(value)[...] = array
        return True

    def array(self, value: Any) -> Any:
        kind = np.dtype(ARRAYS[value.type])
        size = int(np.prod(value.shape)) * kind.itemsize
        memory = (ctypes.c_char * size).from_address(self.addresses[value.name])
        return np.frombuffer(memory, kind).reshape(value.shape)


class ICudaEngine:
    def __init__(self, session: Any) -> None:
        self.session = session

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self.session)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert isinstance(logger, ILogger)

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return ICudaEngine(onnxruntime.InferenceSession(serialized_engine, options, ["CPUExecutionProvider"]))


def type_of(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return {7: "i8", 1: "f4", 10: "f2"}[tensor.elem_type], tuple(one.dim_value for one in tensor.shape.dim)
