"""The messages of the Open Inference Protocol (KServe v2) over gRPC, for the server and the load test alike."""
