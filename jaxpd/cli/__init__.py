"""The command line. Nothing here imports JAX before a command needs it, so that `--help` answers at once.

This is the one package of `jaxpd` that may import `serving`.
"""
