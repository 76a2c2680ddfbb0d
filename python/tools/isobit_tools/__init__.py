"""What runs isobit's services from a checkout: launcher, demo, converter of SmolLM2, a test case.

The client, the package `isobit`, knows nothing of it.
"""
