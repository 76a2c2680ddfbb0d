"""What only a checkout needs: the base class of tests, the training demo. Other names here are old ones.

The client, the package `isobit`, does not depend on it.
"""
