"""Python clients of the batond gRPC API."""
