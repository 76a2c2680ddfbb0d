"""Runs isobit's services from a checkout: launcher, demo, converter of SmolLM2, base class of tests.

The client, the package `isobit`, does not depend on it.
"""
