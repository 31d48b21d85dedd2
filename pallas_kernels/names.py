"""Names of implementations, for whoever must know them before JAX is imported."""

AUTO = "auto"
XLA = "xla"
TPU = "pallas_tpu"
GPU = "pallas_gpu"
TPU_INTERPRET = "pallas_tpu_interpret"
GPU_INTERPRET = "pallas_gpu_interpret"
NAMES = (XLA, TPU, GPU, TPU_INTERPRET, GPU_INTERPRET)
PLATFORM_OF = {TPU: "tpu", GPU: "gpu", TPU_INTERPRET: "cpu", GPU_INTERPRET: "cpu"}
