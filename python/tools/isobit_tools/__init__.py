"""Code that only a checkout needs: the base class of tests, and the training demo. The other modules are old
names.

The package `isobit` does not depend on it.
"""
