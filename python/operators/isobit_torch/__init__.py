"""Holds libisobit_torch.so, the operators that isobit.torch loads; nothing here is to be imported."""
