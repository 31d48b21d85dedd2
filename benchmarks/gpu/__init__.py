"""Parts of benchmarks/gpu_suite.py, each run in a process of its own."""
