"""The generated modules of the batond.v1 gRPC contract; the .proto files beside them are the source."""
