"""The wire: `jaxpd/v1`, `open_inference`, and the modules that `python -m serving.proto.generate` makes of both.

Generated code is committed, so that nobody needs a compiler to install jaxpd; a test holds it to the sources.
"""
