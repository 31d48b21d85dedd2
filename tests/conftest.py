"""Before any test touches JAX: CPU, with 16 virtual devices, and a compile cache that lives as long as the machine."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
