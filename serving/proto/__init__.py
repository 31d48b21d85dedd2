"""The wire: `jaxpd/v1/*.proto`, and the modules that `python -m serving.proto.generate` makes of them.

Generated code is committed, so that nobody needs a compiler to install jaxpd; a test holds it to the sources.
"""
