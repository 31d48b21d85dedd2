"""Makes the Python modules of the `.proto` files again: `python -m serving.proto.generate [FOLDER]`.

The compiler is given the repository root as its only root. Made from `serving/proto` instead, the modules would import
`jaxpd.v1` and collide with the engine's package. Made with grpcio-tools 1.81.1 they run on every protobuf from 6.33.5
to 7.x; newer tools would shut protobuf 6, and with it other clients' packages, out of the environment.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys

TOOLS_VERSION = "1.81.1"
ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (
    "serving/proto/jaxpd/v1/inference.proto",
    "serving/proto/jaxpd/v1/control.proto",
    "serving/proto/jaxpd/v1/worker.proto",
    "serving/proto/open_inference/open_inference.proto",
)
# Other packages bring messages of the same full names, and one pool of descriptors holds a name once: in the default
# pool these would make it impossible to import jaxpd and, say, tritonclient into one process.
POOL_OF_ITS_OWN = "serving/proto/open_inference/open_inference_pb2.py"


def generated_files() -> tuple[str, ...]:
    """Paths of all generated modules, relative to the repository root."""
    stems = [source.removesuffix(".proto") for source in SOURCES]
    return tuple(stem + end for stem in stems for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"))


def generate(out: pathlib.Path = ROOT) -> None:
    """Writes `generated_files()` below `out`. Raises SystemExit with other tools or a broken source."""
    from grpc_tools import protoc

    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOLS_VERSION:
        raise SystemExit(f"grpcio-tools {installed} is installed; pip install grpcio-tools=={TOOLS_VERSION}")
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    code = protoc.main([*arguments, *(str(ROOT / source) for source in SOURCES)])
    if code:
        raise SystemExit(code)
    module = out / POOL_OF_ITS_OWN
    source, default, own = module.read_text("utf-8"), "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"
    if source.count(default) != 1:
        raise SystemExit(f"{module} is not made as expected: {default} stands there {source.count(default)} times")
    module.write_text(source.replace(default, own), "utf-8")


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
