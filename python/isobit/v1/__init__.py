"""Protobuf and gRPC stubs, generated from proto/isobit/v1 when the package is built."""
