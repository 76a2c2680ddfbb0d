"""What runs isobit's services from a checkout: a launcher, the demo, the converter of SmolLM2.

The client, the package `isobit`, knows nothing of it.
"""
